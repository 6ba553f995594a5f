"""Tables of the pages are those of the results."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.report.doc_tables.tables import tables
from benchmarks.report.markdown import PLACE, MarkdownTable, fill_pages, filled
from benchmarks.report.reading import Source
from fullstride.errors import ConfigError
from tests.benchmarks.report.markup import as_number, cells_by_row

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "results"
# The planning page is checked beside the fit, whose counts it shares.
PLANNING = {"plans", "plan-factors", "predicted"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_table_of_the_pages_is_that_of_the_results():
    pages = [page for page in PAGES if page.name != "planning.md"]
    changed = fill_pages(pages, tables(RESULTS), check=True)
    assert [page.name for page in changed] == [], "run: python -m benchmarks report readme"


def test_every_table_stands_in_a_page_and_names_its_files():
    found = {match[2]: match[0] for page in PAGES for match in PLACE.finditer(page.read_text())}
    assert set(found) == set(tables(RESULTS))
    assert {match[2] for match in PLACE.finditer((ROOT / "docs" / "planning.md").read_text())} == PLANNING
    sources = set(re.findall(r"`benchmarks/results/([^`]+)`", "".join(found.values())))
    assert len(sources) > 8
    assert all((RESULTS / name).is_file() for name in sources)


def _newest(case: str, device: str | None = None) -> dict[str, Any]:
    """The newest result whose file's name starts so, of that device if one is named."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{case}--*.json"))]
    found = [data for data in found if device in (None, data.get("device"))]
    return max(found, key=lambda data: (data.get("environment", {}).get("date") or "")[:10])


def _told(cell: str):
    """The first number in milliseconds of a cell, as far as its digits go."""
    found = re.search(r"([\d,]+(?:\.(\d+))?) ms", cell.replace("**", ""))
    assert found, f"{cell}: no milliseconds"
    return pytest.approx(as_number(found[1]), abs=0.51 * 10.0 ** -len(found[2] or ""))


def test_the_readmes_numbers_are_those_of_the_files():
    rows = cells_by_row((ROOT / "README.md").read_text())
    ours, theirs = next(cells[:2] for first, cells in rows.items() if first.startswith("CIFAR-10's whole MeanFlow"))
    peer = {row["name"]: row["timing"]["median_ms"] for row in _newest("meanflow-peer", "cuda")["rows"]}
    assert peer["fullstride, bf16"] == _told(ours)
    assert peer["py-meanflow"] == _told(theirs)
    assert peer["fullstride, tf32"] == _told(theirs.rpartition("; ")[2])
    ours, usual = next(cells[:2] for first, cells in rows.items() if first.startswith("the host's time to call"))
    host = {row["name"]: row["timing"]["median_ms"] for row in _newest("train-step--base--host", "cuda")["rows"]}
    assert host["TrainStep grouped"] == _told(ours)
    assert host["filter_jit"] == _told(usual)


def test_another_number_is_seen_and_written(tmp_path):
    results = shutil.copytree(RESULTS, tmp_path / "results")
    demo = tables(results)["demo"]()
    (file,) = (path for path in results.glob("meanflow-demo--*cores.json") if f"/{path.name}`" in demo)
    data = json.loads(file.read_text())
    data["samplers"]["meanflow 1"]["score"]["energy_distance"] = 0.98765
    file.write_text(json.dumps(data))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: demo -->\n| old |\n<!-- end of table -->\nbehind\n")
    command = ["report", "readme", "--in", str(page), "--results", str(results)]
    refused = CliRunner().invoke(app, [*command, "--check"])
    assert refused.exit_code == 2
    assert "run: python -m benchmarks report readme" in refused.output
    assert "| old |" in page.read_text()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert "0.9877" in page.read_text()
    assert re.fullmatch(r"before\n<!--.*-->\nbehind\n", page.read_text(), re.DOTALL)
    assert CliRunner().invoke(app, [*command, "--check"]).exit_code == 0


# Of a newer result of the same case, machine and network, what is other than in the one that a table is of.
OTHER = {
    ("meanflow-step--unet--bf16--compile,", "headlines"): (
        {"step": "full", "averages": 3},
        {"memory_order": None},
        {"at": "dropout"},
    ),
    ("meanflow-step--unet--tf32--", "step-networks"): ({"memory_order": None}, {"step": "full"}),
    ("meanflow-step--unet--bf16--eager,graph--ratios", "step"): ({"step": "full"}, {"memory_order": None}),
    ("train-step--base--step--*--sdpa--bf16", "steps-gpu"): (
        {"precision": "fp32"},
        {"at": None, "batch_size": 8, "length": 128},
    ),
    ("train-step--tiny--step--fp32--2x64", "steps-cpu"): ({"at": "4x64", "batch_size": 4}, {"precision": "bf16"}),
    ("llm--qwen3-0.6b--bfloat16--large--token", "llm-kernels"): ({"at": "sequences-8", "prompts": 8},),
    ("llm-serve--", "serve"): ({"model": "qwen3-0.6b"}, {"precision": "bfloat16"}),
    ("llm-hostile--", "hostile"): ({"model": "qwen3-0.6b"}, {"precision": "bfloat16"}),
    ("paged-attention--32-8", "paged-attention"): ({"precision": "float32"},),
    ("meanflow-loader--nvidia", "loader"): ({"at": "batch-8", "batch_size": 8},),
    ("meanflow-scaling--unet,dit_b2--", "gpus"): (
        {"precision": "fp32"},
        {"backend": "eager"},
        {"at": "batch-8", "batch_size": 8},
    ),
}


@pytest.mark.parametrize(("of", "conditions"), [(of, each) for of, every in OTHER.items() for each in every])
def test_a_newer_result_of_other_settings_takes_no_place_in_a_table(of, conditions, tmp_path):
    start, name = of
    results = shutil.copytree(RESULTS, tmp_path / "results")
    file = min(results.glob(f"{start}*.json"))  # of one of its machines
    data = json.loads(file.read_text())
    data["conditions"] = {key: value for key, value in (data["conditions"] | conditions).items() if value is not None}
    data["environment"]["date"] = "2999-01-01T00:00:00+00:00"
    (results / f"{file.name.partition('--')[0]}--other.json").write_text(json.dumps(data))
    assert tables(results)[name]() == tables(RESULTS)[name]()


def test_a_table_or_a_result_that_is_not_there_is_an_error(tmp_path):
    text = "<!-- table: nothing -->\n<!-- end of table -->"
    with pytest.raises(ConfigError, match="page: no table 'nothing', expected one of demo"):
        filled(text, {"demo": str}, "page")
    (tmp_path / "one.json").write_text('{"what": "x"}')
    with pytest.raises(ConfigError, match="no result of meanflow-step with device=cuda, model=unet"):
        tables(tmp_path)["headlines"]()


DEMO, END = "<!-- table: demo -->", "<!-- end of table -->"


@pytest.mark.parametrize(
    ("text", "message"),
    {
        f"{DEMO}\nold\nprose\n{DEMO}\n{END}": f"line 4: {DEMO}; expected {END} of {DEMO}",
        f"{DEMO}\nold\n": f"{DEMO} has no {END}; add it behind the table",
        f"old\n{END}\n": f"line 2: {END}; expected the table to begin first",
        f"<!-- table: demo of h 2 -->\n{END}": "line 1: <!-- table: demo of h 2 -->; expected <!-- table: NAME -->",
        f"<!--table: demo-->\nold\n{END}": "line 1: <!--table: demo-->; expected <!-- table: NAME -->",
    }.items(),
)
def test_a_mark_that_was_forgotten_or_misspelt_is_an_error_and_costs_no_text(tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ConfigError, match=rf"page\.md[,:] {re.escape(message)}"):
        fill_pages([page], {"demo": str})
    assert page.read_text() == text


def test_blanks_behind_a_mark_change_nothing():
    text = f"{DEMO} \nold\n{END} \nbehind"
    assert filled(text, {"demo": lambda _: "new"}, "page") == text.replace("old", "\nnew\n")


@pytest.mark.parametrize("name", sorted(PLANNING))
def test_a_table_of_one_machine_takes_no_other(name):
    text = f"<!-- table: {name} of nvidia-h100 -->\n<!-- end of table -->"
    with pytest.raises(ConfigError, match=f"table '{name}' of nvidia-h100: it is of one machine.*leave out"):
        filled(text, tables(RESULTS), "page")


def test_rows_of_several_files_say_which_they_are_of():
    environment = {"commit": "0123456789", "dirty": True, "date": "2031-02-03T00:00", "versions": {"torch": "9.9"}}
    first, second = (Source(f"{name}.json", {"environment": environment}) for name in "ab")
    table = MarkdownTable(("what", "ms"))
    table.add("x", "1", of=first)
    assert "| what | ms |\n| --- | ---: |\n| x | 1 |" in str(table)
    table.add("y", "2", of=(second, first))
    assert "| y | 2 | [2], [1] |" in str(table)
    assert "2. `benchmarks/results/b.json`: torch 9.9, commit 0123456+, 2031-02-03" in str(table)


def test_a_result_that_is_not_as_its_table_expects_is_told_by_both_names(tmp_path):
    results = shutil.copytree(RESULTS, tmp_path / "results")
    (file,) = results.glob("llm-token-kernel*.json")
    file.write_text(json.dumps({"groups": {}}))
    with pytest.raises(ConfigError, match="table 'llm-token-stamps': a result is not as it expects.*'stamps'"):
        tables(results)["llm-token-stamps"]()


def test_pages_are_utf8_whatever_the_locale(tmp_path):
    page = tmp_path / "a page.md"
    page.write_text("µ\n<!-- table: phase2-cpu -->\n<!-- end of table -->\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks", "report", "readme", "--in", page.name, "--results", str(RESULTS)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0.0612 ± 0.0018" in page.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").startswith("µ\n")


def test_a_pages_line_ends_and_a_link_to_it_stay(tmp_path):
    page, link = tmp_path / "real.md", tmp_path / "link.md"
    page.write_bytes(f"# x \r\n{DEMO}\r\nold\r\n{END}\r\nbehind\r\n".encode())
    link.symlink_to(page)
    assert fill_pages([link], {"demo": lambda _: "new"}) == [link]
    assert link.is_symlink()
    assert page.read_bytes() == f"# x \r\n{DEMO}\r\n\r\nnew\r\n\r\n{END}\r\nbehind\r\n".encode()
    assert fill_pages([link], {"demo": lambda _: "new"}) == []

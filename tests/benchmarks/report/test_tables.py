"""Tests that tables hold the results' numbers, and that the pages' tables are made of the results here."""

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
from benchmarks.harness.experiment_table import number
from benchmarks.report.placed.experiments import compared
from benchmarks.report.placed.steps import COMPILED
from benchmarks.report.places import PLACE, fill_pages, filled, makers
from benchmarks.report.tables import Rows, Table, fill
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM, write_rows
from tests.benchmarks.report.made import row as made_row
from tests.benchmarks.report.markup import as_number, cells_by_row

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLANNING = {"plans", "predicted"}


@pytest.fixture(scope="module")
def tables():
    return makers(RESULTS)


def test_every_table_of_the_pages_is_that_of_the_results(tables):
    # The planning page is checked beside the fit, whose counts it shares.
    changed = fill_pages([page for page in PAGES if page.name != "plan-a-run.md"], tables, check=True)
    assert [page.name for page in changed] == [], "run: python -m benchmarks report tables"


def test_every_table_stands_in_a_page_and_names_its_files(tables):
    found = {match["name"]: match[0] for page in PAGES for match in PLACE.finditer(page.read_text())}
    assert set(found) == set(tables)
    sources = set(re.findall(r"`benchmarks/results/([^`]+)`", "".join(found.values())))
    assert len(sources) > 8
    assert all((RESULTS / name).is_file() for name in sources)


def copied(folder: Path, case: str) -> Path:
    """Copy the results of cases whose names begin so."""
    (results := folder / "results").mkdir()
    for file in RESULTS.glob(f"{case}*.json"):
        shutil.copy(file, results)
    return results


def _newest(case: str, device: str | None = None) -> dict[str, Any]:
    """Return the newest result whose file name starts so, of that device if one is named."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{case}--*.json"))]
    found = [data for data in found if device in (None, data.get("device"))]
    return max(found, key=lambda data: (data.get("environment", {}).get("date") or "")[:10])


def _told(cell: str):
    """Return the first number in milliseconds of a cell, as far as its digits go."""
    found = re.search(r"([\d,]+(?:\.(\d+))?) ms", cell.replace("**", ""))
    assert found, f"{cell}: no milliseconds"
    return pytest.approx(as_number(found[1]), abs=0.51 * 10.0 ** -len(found[2] or ""))


def test_the_readmes_numbers_are_those_of_the_files():
    rows = cells_by_row((ROOT / "README.md").read_text())
    ours, theirs = next(cells[:2] for first, cells in rows.items() if first.startswith("CIFAR-10's whole MeanFlow"))
    peer = {row["name"]: row["timing"]["median_ms"] for row in _newest("meanflow-peer", "cuda")["rows"]}
    assert peer["fullstride, tf32"] == _told(ours)
    assert peer["fullstride, bf16"] == _told(ours.partition("; ")[2])
    assert peer["py-meanflow"] == _told(theirs)
    ours, usual = next(cells[:2] for first, cells in rows.items() if first.startswith("BERT-base training step"))
    rows_of_bert = _newest("train-step--base--step--sdpa", "cuda")["rows"]
    step = {row["name"]: row["extra"]["free"]["median_ms"] for row in rows_of_bert}
    assert step["TrainStep grouped, sdpa"] == _told(ours)
    assert step["filter_jit, sdpa"] == _told(usual)
    assert step["filter_jit donated, sdpa"] == _told(usual.partition("; ")[2])


def test_rows_are_spread_named_ordered_and_written(tmp_path):
    """Compare the numbers of a table with the inputs."""
    times = {(size, who): made_row(f"{size}: {who}", rate=RANDOM.uniform(1, 9)) for size in ("b", "a") for who in "xy"}
    times["a", "y"] = made_row("a: z")  # which is in no column
    results = write_rows(
        tmp_path, "llm", list(times.values()), model="m", left_out=[{"name": "a: y", "why": "no: memory"}]
    )
    table = Table(
        ("size", "x", "y", "x / y", "rate"),
        [Rows("llm--m--*", ("{size}", "{one_median:n3}", "{two_median:.2f}", "{ratio:.1f}", "{one_rate:.3f}"),
              names=r"(?P<size>\w): (?P<who>[xy])", index=("size",), by=("who",), across={"one": "x", "two": "y"},
              compute={"ratio": lambda t: t.one_median / t.two_median})],
    )  # fmt: skip
    rows = cells_by_row(table.markdown(results))
    ms = {key: row.timing.median_ms for key, row in times.items()}
    assert list(rows)[2:] == ["b", "a"]
    rate = {size: f"{times[size, 'x'].extra['rate']:.3f}" for size in "ab"}
    ratio = f"{ms['b', 'x'] / ms['b', 'y']:.1f}"
    assert rows["b"] == [number(ms["b", "x"], 3), f"{ms['b', 'y']:.2f}", ratio, rate["b"]]
    assert rows["a"] == [number(ms["a", "x"], 3), "no", "", rate["a"]]
    missing = Table(("x",), [Rows("llm--m--*", ("{q_median}",), across={"q": "a: q"})])
    with pytest.raises(ConfigError, match="llm--m--a-gpu.json: no row a: q; measure it again"):
        missing.markdown(results)


def test_where_several_fall_together_the_first_of_an_order_is_taken(tmp_path):
    rows = [made_row("a", backend=backend, batch=1) for backend in ("eager", "graph")]
    results = write_rows(tmp_path, "llm", rows, model="m")
    for order, taken in (("backend", 0), ("-backend", 1)):
        block = Rows("llm--m--*", ("{x_median}",), first=order, by=("batch",), across={"x": "1"})
        assert [float(cells[0]) for cells, _ in block.written(results)] == [rows[taken].timing.median_ms]


def test_rows_of_several_files_say_which_they_are_of(tmp_path):
    for gpu in ("GPU A", "GPU B"):
        results = write_rows(tmp_path, "llm", [made_row("x"), made_row("y")], gpu=gpu, model="m")
    one = Table(("row",), [Rows("llm--m--gpu-a", ("{row}",))])
    assert "| row |\n| --- |\n| x |\n| y |" in one.markdown(results)
    two = Table(("row",), [*one.rows, Rows("llm--m--gpu-b", ("{row}",), where="row == 'y'")])  # pyright: ignore[reportGeneralTypeIssues]
    text = two.markdown(results)
    assert "| x | [1] |\n| y | [1] |\n| y | [2] |" in text
    assert "2. `benchmarks/results/llm--m--gpu-b.json`: GPU B, 2026-11-01" in text
    assert Table(("row",), [Rows("llm--m--*", ("{row}",))]).markdown(results, "gpu-b").count("gpu-a") == 0


SEVERAL = {0: 1.0, 1: 3.0}  # 2 ± 1.4


@pytest.mark.parametrize(
    ("others", "cells"),
    [
        ([{0: 4.0, 1: 4.1}], ["**2.0 ± 1.4**", "4.0 ± 0.1"]),
        ([{0: 3.3, 1: 3.5}], ["2.0 ± 1.4", "3.4 ± 0.1"]),  # nearer than a deviation
        ([{0: 9.0}], ["2.0 ± 1.4", "9.0"]),  # of one seed, which has none
        ([None, {0: 1.0, 1: 1.1}], ["2.0 ± 1.4", "", "1.1 ± 0.1"]),
    ],
)
def test_the_lowest_is_bold_if_the_next_is_farther_than_both_vary(others, cells):
    assert compared([SEVERAL, *others], ".1f") == cells


def test_another_number_is_seen_and_written(tmp_path):
    results = copied(tmp_path, "")
    file = results / "train-step--base--host--intel-xeon-2-cores.json"
    data = json.loads(file.read_text())
    data["rows"][0]["timing"]["median_ms"] = 98.765
    file.write_text(json.dumps(data))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: host-cpu -->\n| old |\n<!-- end of table -->\nbehind\n")
    command = ["report", "tables", str(page), "--results", str(results)]
    refused = CliRunner().invoke(app, [*command, "--check"])
    assert refused.exit_code == 2
    assert "run: python -m benchmarks report tables" in refused.output
    assert "| old |" in page.read_text()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert "98.765" in page.read_text()
    assert re.fullmatch(r"before\n<!--.*-->\nbehind\n", page.read_text(), re.DOTALL)
    assert CliRunner().invoke(app, ["report", "readme", "--in", *command[2:], "--check"]).exit_code == 0  # as it was


# Of a newer result of the same case, machine and network, what its name has more, and the table that it is not of.
OTHER = {
    f"{COMPILED.removesuffix('--channels_last--*')}--full--channels_last": "headlines",
    "meanflow-step--unet--tf32--graph,compile+graph--ratios--full": "step-networks",
    "train-step--base--step--sdpa--fp32--64x512": "steps-gpu",
    "llm--qwen3-0.6b--bfloat16--large--token--sequences-8": "llm-kernels",
    "jvp-norms--fp32--auto--all": "jvp-norms",
}


@pytest.mark.parametrize("stem", OTHER)
def test_a_newer_result_of_other_settings_takes_no_place_in_a_table(stem, tables, tmp_path):
    case, table = stem.partition("--")[0], OTHER[stem]
    results = copied(tmp_path, "" if table == "headlines" else case)
    file = next(file for file in sorted(results.glob(f"{case}--*nvidia-h200.json")))
    data = json.loads(file.read_text())
    data["environment"]["date"] = "2999-01-01T00:00:00+00:00"
    (results / f"{stem}--nvidia-h200.json").write_text(json.dumps(data))
    assert makers(results)[table]("") == tables[table]("")


def test_a_table_or_a_result_that_is_not_there_is_an_error(tmp_path):
    text = "<!-- table: nothing -->\n<!-- end of table -->"
    with pytest.raises(ConfigError, match="page: no table 'nothing', expected one of demo"):
        filled(text, {"demo": str}, "page")
    (tmp_path / "one.json").write_text('{"what": "x"}')
    with pytest.raises(ConfigError, match=r"no result jvp-attention--.*; measure the case again"):
        makers(tmp_path)["headlines"]("")


def test_a_result_that_is_not_as_its_table_expects_is_told_by_its_name(tmp_path):
    results = copied(tmp_path, "experiment-phase4")
    file = next(results.glob("experiment-phase4--gpu--nvidia-h100*.json"))
    data = json.loads(file.read_text())
    data["parts"] = [part | {"rows": [row | {"labels": {}} for row in part["rows"]]} for part in data["parts"]]
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="table 'phase4-ratio-gpu': .* unexpected form.*measure it again"):
        makers(results)["phase4-ratio-gpu"]("")


DEMO, END = "<!-- table: demo -->", "<!-- end of table -->"


@pytest.mark.parametrize(
    ("text", "message"),
    {
        f"{DEMO}\nold\nprose\n{DEMO}\n{END}": f"{DEMO} inside table demo; expected {END} before it",
        f"{DEMO}\nold\n": f"unpaired {DEMO}; expected",
        f"old\n{END}\n": f"unpaired {END}; expected <!-- table: NAME",
        f"<!-- table: demo of h 2 -->\n{END}": "unpaired <!-- table: demo of h 2 -->; expected",
        f"<!--table: demo-->\nold\n{END}": "unpaired <!--table: demo-->",
    }.items(),
)
def test_a_mark_that_was_forgotten_or_misspelt_is_an_error_and_costs_no_text(tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ConfigError, match=rf"page\.md: {re.escape(message)}"):
        fill_pages([page], {"demo": str})
    assert page.read_text() == text


def test_a_pages_line_ends_and_a_link_to_it_stay(tmp_path):
    page, link = tmp_path / "real.md", tmp_path / "link.md"
    page.write_bytes(f"# x \r\n{DEMO}\r\nold\r\n{END}\r\nbehind\r\n".encode())
    link.symlink_to(page)
    assert fill_pages([link], {"demo": lambda _: "new"}) == [link]
    assert link.is_symlink()
    assert page.read_bytes() == f"# x \r\n{DEMO}\r\n\r\nnew\r\n\r\n{END}\r\nbehind\r\n".encode()
    assert fill_pages([link], {"demo": lambda _: "new"}) == []


@pytest.mark.parametrize("name", sorted(PLANNING))
def test_a_table_of_one_machine_takes_no_other(name, tables):
    text = f"<!-- table: {name} of nvidia-h100 -->\n<!-- end of table -->"
    with pytest.raises(ConfigError, match=f"table '{name}': it describes the planner's own machine; remove"):
        filled(text, tables, "page")


def test_pages_are_utf8_whatever_the_locale(tmp_path):
    page = tmp_path / "a page.md"
    page.write_text("µ\n<!-- table: phase5-objective-cpu -->\n<!-- end of table -->\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks", "report", "tables", page.name, "--results"]
    command.append(str(copied(tmp_path, "experiment-phase5")))
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("µ\n")
    assert " ± " in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (9.8145, "9.815"),
        (0.0991, "0.09910"),
        (1e-5, "0.00001000"),
        (-5.821e-11, "-5.8e-11"),
        (36389.3, "36,389"),
        (-1.5, "-1.500"),
        # Which rounding gives one digit more in front of the point.
        (999.96, "1,000"),
        (9.99996, "10.00"),
        (0.0999996, "0.1000"),
    ],
)
def test_numbers_have_four_digits_and_an_exponent_only_where_rounding_is_all_there_is(value, text):
    assert number(value) == text
    assert fill("{x:n4}", {"x": value}) == text


def test_a_time_below_its_bound_is_marked_and_what_is_missing_says_why():
    assert fill("{x:over} x", {"x": 0.5}) == "0.500 (!) x"
    assert fill("{median:.1f} ms", {"median": float("nan"), "why": "no memory: of 80 GB"}) == "no memory"
    assert fill("{a_median:.1f}", {"a_median": None, "a_why": "left out"}) == ""
    with pytest.raises(ConfigError, match="no y in the result"):
        fill("{y}", {"x": 1})

import json
import re
import sys
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.harness.code_digest import digest_of
from benchmarks.harness.experiment_table import number
from benchmarks.report.frame import read_results
from benchmarks.report.pages import ABOUT_ALL, pages
from benchmarks.report.plots import COLOURS, SERIES, Drawn, Series, bars, cut, dots, lines, look
from benchmarks.report.staleness import ROOT
from tests.benchmarks.report.made import RANDOM, SEED, write_all, write_other, write_rows
from tests.benchmarks.report.made import row as made_row
from tests.benchmarks.report.markup import Page


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made = write_all(folder)
    write_other(folder)
    (folder / "later.json").write_text('{"schema": 99}')
    return folder, made


@pytest.fixture(scope="module")
def made_pages(results):
    return pages(read_results(results[0]))


def _rows(text: str) -> list[list[str]]:
    return [row for table in Page(text).tables for row in table]


def test_every_row_stands_on_its_cases_page_with_the_numbers_of_its_json(results, made_pages):
    for result in results[1]:
        rows = _rows(made_pages[result.case])
        for row in result.rows:
            times = [row.timing.median_ms, row.timing.quantile(0.1), row.timing.quantile(0.9), row.floor.ms]
            assert [row.name, *map(number, times), row.floor.bound] in [cells[:6] for cells in rows], f"seed {SEED}"


def test_each_result_has_the_command_and_the_minutes_that_repeat_it(tmp_path):
    seconds, expected = RANDOM.uniform(60, 6000), {}
    write_all(tmp_path)
    for place, path in enumerate(sorted(tmp_path.glob("*.json"))):
        data = json.loads(path.read_text())
        data["environment"] |= {"command": f"fullstride bench case-{place}", "seconds": seconds + 60 * place}
        path.write_text(json.dumps(data))
        expected[re.sub(r"[^a-z0-9]", "-", path.stem)] = (
            f"{seconds / 60 + place:.1f}",
            f"python -m benchmarks case-{place}",
        )
    found = pages(read_results(tmp_path))["measure-again"]
    lines = re.findall(r"#(\S+)\) \| .*? \| ([\d.]+) \| `([^`]+)` \|\n", found)
    assert {anchor: rest for anchor, *rest in lines} == {anchor: [*rest] for anchor, rest in expected.items()}


def test_pages_are_whole_and_nothing_is_fetched(made_pages):
    for text in made_pages.values():
        drawings = "".join(re.findall(r"<(?:figure|details).*?</(?:figure|details)>", text, re.DOTALL))
        page = Page(drawings)
        assert page.errors == []
        assert len(page.ids) == len(set(page.ids))
        assert re.findall(r"#[0-9a-f]{6}\b", drawings) == []  # colours are the page's own
        assert not re.search(r"url\((?!#)|<script|<link", drawings)
        assert all(figure["caption"].strip() and figure["label"] for figure in page.figures)
        assert all(len({len(row) for row in table}) == 1 for table in page.tables)
    style = (ROOT / "docs" / "site.css").read_text()
    assert all(style.count(f"--{name}:") == 2 for name in COLOURS)  # light and dark


def test_names_in_drawings_and_tables_are_written_as_they_are(made_pages):
    text = made_pages["jvp-attention"]
    assert ">B2 H3 &lt;L256&gt; &amp; $D_80$<" in "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "B2 H3 <L256> & $D_80$ forward, ours" in [row[0] for row in _rows(text)]


def test_other_files_are_shown_and_what_is_not_read_is_named(made_pages):
    assert "a <demo>" in made_pages["other"]
    assert ["nfe", "5"] in _rows(made_pages["other"]) or "5" in str(_rows(made_pages["other"]))
    assert "`later.json`, schema 99, expected 1" in made_pages["index"]


def test_what_was_left_out_stands_among_the_rows(made_pages):
    assert any("no memory" in row for row in _rows(made_pages["jvp-attention"]))


def test_changed_code_under_test_alone_is_a_warning(tmp_path):
    data = json.loads(next((ROOT / "benchmarks" / "results").glob("jvp-norms--*h200.json")).read_text())
    kernel, harness = "fullstride/jvp/norms/row_forward.py", "benchmarks/cases/jvp/norms.py"
    now = {file: digest_of(ROOT / file) for file in (kernel, harness)}
    for name, file in (("a", kernel), ("b", harness)):
        data["environment"]["code"] = now | {file: "another"}
        (tmp_path / f"jvp-norms--{name}--h.json").write_text(json.dumps(data))
    text = pages(read_results(tmp_path))["jvp-norms"]
    (warning,) = re.findall(r"!!! warning.*?\n\n(?=\S)", text, re.DOTALL)
    assert "row_forward.py" in warning
    assert "norms.py" not in warning


def test_a_result_whose_rows_are_not_its_cases_is_shown_without_figures(tmp_path):
    results = ROOT / "benchmarks" / "results"
    data = json.loads(next(results.glob("paged-attention--*.json")).read_text())
    data["rows"] = [row | {"extra": {}, "name": f"strange {i}"} for i, row in enumerate(data["rows"])]
    (tmp_path / "odd.json").write_text(json.dumps(data))
    text = pages(read_results(tmp_path))["paged-attention"]
    assert "A figure is not drawn, as rows are not as it expects" in text
    assert "strange 0" in [row[0] for row in _rows(text)]


def test_the_results_of_this_repository_make_pages(monkeypatch):
    monkeypatch.setattr(Drawn, "inline", lambda self: "<svg></svg>")  # which the site's own build takes its time for
    monkeypatch.setattr("benchmarks.report.staleness.digest_of", lambda file: "another")  # of hundreds of files
    results = read_results(ROOT / "benchmarks" / "results")
    found = pages(results)
    assert set(found) == {*ABOUT_ALL, *(source.case for source in results.sources.values())}
    assert not any("not drawn" in text or "are not as expected" in text for text in found.values())
    assert sum(text.count("<svg") for text in found.values()) > 50
    for name, source in results.sources.items():
        assert f"`{name}`" in found[source.case]
    # Results that the documentation no longer has in a table.
    for case, cell in (
        ("train-step", "flat list, large"),
        ("meanflow-loader", "pictures, 16 workers"),
        ("other", "sentinel"),
    ):
        assert cell in found[case]


def test_the_site_has_the_pages_in_its_navigation_and_its_search(results, tmp_path):
    # Not strictly: pages link to results that are not there. `make docs` builds those of the documentation.
    others = "\n".join(["hooks/", "ruff.toml", "tutorials/", "how-to/", "migrate/", "reference/", "explanation/"])
    given = {"site_dir": str(tmp_path), "strict": False, "exclude_docs": others, "extra": {"results": results[0]}}
    config = load_config(str(ROOT / "mkdocs.yml"), **given)
    build(config)
    page = (tmp_path / "results" / "jvp-norms" / "index.html").read_text()
    assert 'href="../something-new/"' in page
    assert "<figure" in page
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert "Norms with their derivatives" in [
        one["title"] for one in found if one["location"].startswith("results/jvp")
    ]
    assert not any("<svg" in one["text"] or "ours, forward" in one["text"] for one in found)


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "pandas"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path, monkeypatch, package):
    for module in [name for name in sys.modules if name.startswith("benchmarks.report.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    done = CliRunner().invoke(app, ["report", "runs", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{package} is not installed; run, from the root of a clone: pip install '.[report]'" in done.output


def test_a_figure_of_decode_steps_has_bounds_in_its_lines_colours(tmp_path):
    rows = [made_row(f"{b}, {c}", batch=b, context=c, tokens_per_second=1.0 * b) for c in (64, 128) for b in (1, 2, 4)]
    write_rows(tmp_path, "llm", rows, model="m", section="sweep", kernels="k")
    text = pages(read_results(tmp_path))["llm"]
    assert "Decode steps, dashed what reading the weights" in text
    assert text.count("stroke-dasharray") == 2


def test_a_label_that_is_cut_keeps_its_machine():
    words = "case: unet, " + ", ".join(str(RANDOM.random()) for _ in range(9))
    cuts = {cut(f"{words} ({machine})", 50) for machine in ("H100 80GB HBM3", "H200")}
    assert {re.sub(r".* \.\.\. ", "", one) for one in cuts} == {"(H100 80GB HBM3)", "(H200)"}
    assert all(len(one) <= 50 and one.startswith("case: unet, ") for one in cuts)
    assert cut("case: unet (CPU)", 50) == "case: unet (CPU)"
    assert len(cut(words, 50)) <= 50


def test_every_series_of_a_figure_looks_like_no_other():
    looks = [tuple(look(place).items()) for place in range(2 * len(SERIES) + 1)]
    assert len(set(looks)) == len(looks)
    assert len({dict(one)["color"] for one in looks[: len(SERIES)]}) == len(SERIES)
    assert set(SERIES) < set(COLOURS)


def test_figures_draw_the_numbers_that_they_are_given():
    values = {"a": RANDOM.uniform(1, 9), "b": RANDOM.uniform(1, 9)}
    drawn = dots([Series("x", values), Series("bound", {"a": 0.5}, bound=True)], "ms", marks={"best": 2.0})
    points: Any = drawn.axes[0].collections[0].get_offsets()
    assert [tuple(point) for point in points] == [(values["a"], 0.0), (values["b"], 1.0)]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["x", "bound", "best"]
    parts: Any = bars([Series("x", values), Series("y", {"b": 3.0}), Series("bound", {"b": 0.5}, bound=True)], "ms")
    boxes = [(box.get_x(), box.get_width(), box.get_y() + box.get_height() / 2) for box in parts.axes[0].patches]
    assert boxes == [(0, values["a"], 0), (0, values["b"], 1), (values["b"], pytest.approx(3.0), 1)]
    assert [text.get_text() for text in parts.legends[0].get_texts()] == ["x", "y", "bound"]
    line: Any = lines([Series("x", {4: 1.0, 1: 2.0}, {4: 3.0, 1: 3.0})], "n", "y", log_x=True).axes[0].lines
    assert [one.get_xydata().tolist() for one in line] == [[[1.0, 2.0], [4.0, 1.0]], [[1.0, 3.0], [4.0, 3.0]]]
    assert line[0].get_color() == line[1].get_color()

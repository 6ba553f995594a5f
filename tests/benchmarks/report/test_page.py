import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.harness.budget import NO_TIME
from benchmarks.harness.results import write_result
from benchmarks.report import jvp, peer
from benchmarks.report.drawing import COLOURS, SERIES, look
from benchmarks.report.figures import cut
from benchmarks.report.history import PACKAGE, Freshness, History
from benchmarks.report.page import render
from benchmarks.report.reading import Result, read_folder
from benchmarks.report.tables import Table, conditions, number, plain, without_empty
from tests.benchmarks.report.made import CONDITIONS, RANDOM, SEED, made, marked, write_all, write_other, write_rows
from tests.benchmarks.report.made import row as made_row
from tests.benchmarks.report.markup import FETCHING, Page, addresses


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made = write_all(folder)
    write_other(folder)
    (folder / "later.json").write_text('{"schema": 99}')
    return folder, made


@pytest.fixture(scope="module")
def text(results):
    return render(read_folder(results[0]), History(None))[0]


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def _cells(page: Page) -> list[list[str]]:
    return [row for table in page.tables for row in table]


def test_every_row_stands_on_the_page_with_the_numbers_of_its_json(results, page):
    rows = _cells(page)
    for result in results[1]:
        for row in result.rows:
            times = [row.timing.median_ms, row.timing.quantile(0.1), row.timing.quantile(0.9)]
            bound = [number(row.floor.ms), row.floor.bound, marked(row.timing.median_ms / row.floor.ms)]
            # What the host takes is not the work that the bound is of.
            wanted = [row.name, *map(number, times), *([] if result.case == "train-step" else bound)]
            assert wanted in rows, f"seed {SEED}"


def test_ratios_and_rates_are_those_of_the_numbers(results, page):
    rows = _cells(page)
    by_case = {result.case: result for result in results[1] if result.device == "cuda"}
    steps = {row.name: row.timing.median_ms for row in by_case["meanflow-step"].rows}
    ratios = [number(steps[f"MeanFlow {s}%, graph"] / steps["FM MSE, graph"], 3) for s in (0, 25, 50, 75, 100)]
    assert ["unet bf16, batch 64", "graph", *ratios] in [row[:7] for row in rows]
    ours = next(row for row in by_case["jvp-attention"].rows if row.extra["who"] == "ours")
    rate = number(ours.extra["gflop"] / ours.timing.median_ms, 3)
    work = number(ours.extra["gflop"])
    assert [ours.extra["shape"], number(ours.timing.median_ms), rate, work] in [row[:4] for row in rows]
    norm = next(row for row in by_case["jvp-norms"].rows if row.extra["who"] == "ours")
    share = f"{100 * norm.floor.ms / norm.timing.median_ms:.0f} %"
    assert [norm.extra["shape"], number(norm.timing.median_ms), share] in [row[:3] for row in rows]
    spoken = by_case["llm"].rows[0]
    assert [spoken.name, number(spoken.extra["tokens_per_second"])] in [row[1:3] for row in rows]


def test_a_whole_step_stands_beside_the_official_codes(results, page):
    (result,) = (result for result in results[1] if result.case == "meanflow-peer")
    for row in result.rows:
        assert [row.name, "preset=cifar10_v1", number(row.timing.median_ms)] in [cells[:3] for cells in _cells(page)]
    found = peer.finding([read for read in read_folder(results[0]).results if read.case == "meanflow-peer"])
    times = {row.name: row.timing.median_ms for row in result.rows}
    assert found is not None
    assert found.value == f"{number(times['fullstride, bf16'])} ms"
    assert f"py-meanflow's own takes {number(times['py-meanflow'])} ms" in found.text


@pytest.mark.parametrize("newest", ["GPU A", "GPU B", "GPU C"])
def test_a_finding_is_of_the_newest_whole_result(tmp_path, newest):
    def write(gpu: str, day: int, **more) -> float:
        row = made_row("pictures, 2 workers", workers=2, records_per_second=made_row("any").timing.median_ms)
        write_rows(tmp_path, "meanflow-loader", [row], gpu=gpu, date=f"2026-11-{day:02}T00:00:00+00:00", **more)
        return row.extra["records_per_second"]

    rates = {gpu: write(gpu, 3 if gpu == newest else 2, batch_size=8) for gpu in ("GPU A", "GPU B", "GPU C")}
    write("GPU D", 9, batch_size=8, left_out=[{"name": "moments", "why": NO_TIME}])
    text = render(read_folder(tmp_path), History(None))[0]
    (finding,) = re.findall(r"<dt>(.*?)</dt><dd>(.*?)\. <a", text)
    assert finding == (
        number(rates[newest]),
        f"records a second by the loader alone: pictures, 2 workers, {newest}",
    )


def test_memory_of_attention_is_in_millions_of_bytes(tmp_path):
    peaks = {"ours": RANDOM.randrange(1, 10**12), "vanilla": RANDOM.randrange(1, 10**12)}
    rows = [
        made_row(f"a {kind}, {who}", shape="a", kind=kind, who=who, gflop=1.0, bytes=1)
        for kind in ("forward", "through")
        for who in peaks
    ]
    rows = [replace(r, timing=replace(r.timing, peak_bytes=peaks[r.extra["who"]])) for r in rows]
    (result,) = write_rows(tmp_path, "jvp-attention", rows, precision="bf16").results
    (table,) = jvp.attention_tables([result], lambda source: Freshness("current", "made"))
    found = dict(zip(table.header, table.rows[0], strict=True))
    for who, columns in {"ours": ("peak MB", "peak MB  "), "vanilla": ("its peak MB", "its peak MB ")}.items():
        assert {found[column] for column in columns} == {number(peaks[who] / 1e6, 3)}


def test_another_fused_derivative_has_columns_a_mark_and_the_finding_where_it_ran(tmp_path):
    fused = "jvp_flash_attention"
    passes = [("forward", "ours"), ("forward", "vanilla"), ("primal", "cudnn"), ("detached", "ours")]
    rows = [made_row(f"a {kind}, {who}", shape="a", kind=kind, who=who, gflop=2.0, bytes=1) for kind, who in passes]
    also = [
        made_row(f"a {kind}, {fused}", shape="a", kind=kind, who=fused, gflop=2.0, bytes=1)
        for kind in ("forward", "detached")
    ]
    for more, name in (([], "math SDPA"), (also, fused)):
        found = {r.name: r.timing.median_ms for r in [*rows, *more]}
        fastest = min(found[f"a forward, {who}"] for who in ("vanilla", fused) if f"a forward, {who}" in found)
        (result,) = write_rows(tmp_path, "jvp-attention", [*rows, *more], precision="bf16").results
        (table,) = jvp.attention_tables([result], lambda source: Freshness("current", "made"))
        cells = dict(zip(table.header, table.rows[0], strict=True))
        shown = [cells.get(column) for column in (f"{fused} ms", f"{fused} ms ")]
        assert shown == ([number(found[r.name]) for r in more] or [None, None])
        assert "primal alone, flash TFLOP/s" not in cells
        finding = jvp.attention_finding([result])
        assert finding is not None
        times = number(fastest / found["a forward, ours"], 3)
        assert f"a: {times} x as fast as " in finding.text
        if not more or found["a forward, vanilla"] > fastest:
            assert f"as fast as {name}, " in finding.text
        (drawn,) = jvp.attention_figures([result])
        assert len(jvp._series(result, jvp.PEERS, lambda row: row.median)) == 3 + bool(more)
        assert drawn.name == "jvp-attention-0"


def test_the_overview_names_machine_versions_commit_date_and_status_of_every_file(page):
    header, *rows = page.tables[0]
    assert header[-5:] == ["measured on", "versions", "commit", "date", "status"]
    assert {row[0].partition(":")[0] for row in rows} == set(CONDITIONS)
    assert sorted(row[-5] for row in rows) == ["AMD EPYC, 2 cores", *["NVIDIA H200"] * len(CONDITIONS)]
    assert {tuple(row[-3:]) for row in rows} == {("unknown", "2031-02-03", "unknown no git repository here")}
    assert {row[-4] for row in rows} == {"torch 2.99.1", "jax 0.99.2", "torch 2.99.1, jax 0.99.2"}


def test_tags_are_balanced_names_unique_and_links_lead_somewhere(page):
    assert page.errors == []
    assert len(page.ids) == len(set(page.ids))
    inner = {target[1:] for target in page.targets if target.startswith("#")}
    assert inner <= set(page.ids)


def test_the_check_of_tags_sees_what_it_should():
    assert Page("<p><b>x</p></b>").errors
    assert Page("<section><p></p>").errors


def test_every_figure_has_a_caption_and_a_label_and_every_table_a_width(page):
    assert len(page.figures) == 9
    assert all(figure["caption"].strip() and figure["label"] for figure in page.figures)
    assert all(len({len(row) for row in table}) == 1 for table in page.tables)


def test_nothing_is_fetched(text, page):
    assert not page.tags & FETCHING
    assert addresses(text) == set()
    assert not re.search(r"@import|url\((?!#)", text)
    assert all(re.fullmatch(r"#[\w-]+|figures/[\w-]+\.(svg|png)", target) for target in page.targets)


def test_colours_are_the_pages_own(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--one)" in drawings
    assert re.findall(r"#[0-9a-f]{6}\b", drawings) == []
    for name in set(re.findall(r"var\(--(\w+)\)", text)):
        assert text.count(f"--{name}:") == 2  # light and dark


def test_names_in_drawings_are_written_as_they_are(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert ">B2 H3 &lt;L256&gt; &amp; $D_80$<" in drawings


def test_other_files_are_shown_and_what_is_not_is_named(page):
    assert "a <demo>" in page.text
    assert ["nfe", "5"] in _cells(page)
    told = page.text[page.text.index("What lies in the folder") :]
    assert "schema 99, expected 1" in told
    assert "bare values: all" in told
    assert "not recorded: measured on, versions, commit, date" in page.text


def test_what_was_left_out_is_named(page):
    assert "Left out: x, no memory." in page.text


def test_the_command_writes_the_page_and_its_figures(results, tmp_path):
    out = tmp_path / "some" / "report"
    done = CliRunner().invoke(app, ["report", "--results", str(results[0]), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "10 results, 0 experiments, 1 other file, 1 unread" in done.output
    page = out / "index.html"
    assert page.read_text().startswith("<!DOCTYPE html>")
    links = {target for target in Page(page.read_text()).targets if target.startswith("figures/")}
    assert links == {str(file.relative_to(out)) for file in (out / "figures").iterdir()}
    assert all((out / link).stat().st_size > 1000 for link in links)
    assert addresses((out / "figures" / "overview.svg").read_text()) == set()


def test_a_result_whose_rows_are_not_its_cases_is_named_and_its_rows_shown(tmp_path):
    made = write_all(tmp_path)
    odd = tmp_path / next(result.file_name for result in made if result.case == "jvp-attention")
    data = json.loads(odd.read_text())
    del data["rows"][0]["extra"]["gflop"]
    odd.write_text(json.dumps(data))
    page = Page(render(read_folder(tmp_path), History(None))[0])
    assert f"{odd.name}not in the overview, tables and figures of jvp-attention" in page.text
    assert data["rows"][0]["name"] in [row[0] for row in _cells(page)]


@pytest.mark.parametrize("case", ["llm-serve", "meanflow-loader", "paged-attention"])
def test_a_result_without_the_row_that_stands_for_it_is_named_and_its_rows_shown(tmp_path, case):
    results = PACKAGE.parent / "benchmarks" / "results"
    data = json.loads(next(results.glob(f"{case}--*.json")).read_text())
    data["rows"] = [row | {"extra": {}, "name": f"strange {i}"} for i, row in enumerate(data["rows"])]
    (tmp_path / "odd.json").write_text(json.dumps(data))
    page = Page(render(read_folder(tmp_path), History(None))[0])
    assert f"odd.jsonnot in the overview, tables and figures of {case}" in page.text
    assert "strange 0" in [row[0] for row in _cells(page)]
    assert "1 of benches" in page.text


def test_the_results_of_this_repository_make_a_page():
    folder = read_folder(PACKAGE.parent / "benchmarks" / "results")
    page = Page(render(folder, History(None))[0])
    assert page.errors == []
    assert len(page.tables[0]) == 1 + len(folder.results) > 20
    assert "rows are not as expected" not in page.text


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
        (-0.999996, "-1.000"),
        (0.0999996, "0.1000"),
    ],
)
def test_numbers_have_four_digits_and_an_exponent_only_where_rounding_is_all_there_is(value, text):
    assert number(value) == text


def test_a_condition_has_no_more_digits_than_it_was_given_and_none_that_is_empty():
    assert [plain(value) for value in (10.0, 0.7, 128, 31.99784, 13000.0, [0, 1])] == [
        "10",
        "0.7",
        "128",
        "32",
        "13,000",
        "0, 1",
    ]
    small = (1e-10, 2e-20, 1.5e-30, -3e-200, 1e-100)
    assert tuple(float(plain(value)) for value in small) == small
    result = Result("r", {"conditions": {"a": 0.5, "b": [], "c": {}, "d": "", "e": None, "ready_seconds": 1.0}})
    assert conditions(result) == "a 0.5"


def test_columns_in_which_nothing_is_written_are_left_out():
    table = without_empty(Table("t", ("a", "b", "c", "d"), [["", "", "1", "2"], ["x", "", "", "3"]], text=2))
    assert (table.header, table.text) == (("a", "c", "d"), 1)
    assert table.rows == [["", "1", "2"], ["x", "", "3"]]
    assert without_empty(Table("t", ("a", "b"), [])).header == ("a", "b")


def _long(tmp_path) -> str:
    """A page of two tables, of three rows and of thirty."""
    rows = [made_row(f"4, {c}", batch=4, context=c, tokens_per_second=1.0) for c in range(1, 31)]
    few = replace(made("something-new"), case="llm", conditions={"section": "sweep", "model": "few"}, rows=rows[:3])
    for one in (few, replace(few, conditions={"section": "sweep", "model": "many"}, rows=rows)):
        write_result(one, tmp_path)
    return render(read_folder(tmp_path), History(None))[0]


def test_a_long_table_is_folded_behind_its_caption(tmp_path):
    text = _long(tmp_path)
    folded = re.findall(r'<details class="long">\s*<summary>(.*?)<', text)
    assert folded == ["Decode steps (section sweep; model many). "]


@pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("pdftotext")), reason="needs Chromium and poppler")
def test_a_long_table_is_printed_and_the_rows_of_files_are_not(tmp_path):
    page, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(_long(tmp_path))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={pdf}", str(page)]
    subprocess.run(browser, check=True, capture_output=True, timeout=120)
    told = subprocess.run(["pdftotext", "-layout", pdf, "-"], check=True, capture_output=True, text=True).stdout
    contexts = re.findall(r"^ +1 +4 +(\d+) ", told, re.MULTILINE)
    assert list(map(int, contexts)) == [1, 2, 3, *range(1, 31)]
    assert "Every row\n" not in told


def test_numbers_keep_their_value():
    value = RANDOM.choice([-1, 1]) * 10 ** RANDOM.uniform(-9, 9)
    digits = 1e-3 if abs(value) >= 1e-6 else 0.05  # below it is what rounding leaves of zero
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=digits)


def test_a_label_that_is_cut_keeps_its_machine():
    words = "case: unet, " + ", ".join(str(RANDOM.random()) for _ in range(9))
    cuts = {cut(f"{words} ({machine})", 50) for machine in ("H100 80GB HBM3", "H200")}
    assert {re.sub(r".* \.\.\. ", "", one) for one in cuts} == {"(H100 80GB HBM3)", "(H200)"}
    assert all(len(one) <= 50 and one.startswith("case: unet, ") for one in cuts)
    assert cut("case: unet (CPU)", 50) == "case: unet (CPU)"
    assert len(cut(f"{words} (CPU), {words}", 50)) <= 50
    assert len(cut(words, 50)) <= 50


def test_every_series_of_a_figure_looks_like_no_other():
    looks = [tuple(look(place).items()) for place in range(2 * len(SERIES) + 1)]
    assert len(set(looks)) == len(looks)
    assert len({dict(one)["color"] for one in looks[: len(SERIES)]}) == len(SERIES)
    assert set(SERIES) < set(COLOURS)

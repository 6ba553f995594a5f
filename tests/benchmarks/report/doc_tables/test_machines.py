"""The table of two machines: each cell is that machine's number, or empty; the README's rows are of one machine."""

import re

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import headlines, machines
from benchmarks.report.markdown import MarkdownTable
from benchmarks.report.reading import read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import ms, row, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

H200, H100, OTHER = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
QWEN = {"model": "qwen3-0.6b", "precision": "bfloat16"}
SECTIONS = [("small", "plain"), ("small", "token"), ("large", "token")]


def _engine() -> list[Row]:
    return [row("fullstride", tokens_per_second=1000 + ms())]


def _is(text: str, value: float) -> None:
    digits = 5e-2 if value < 1e-6 else 1e-2  # what lies so low is told in two
    assert as_number(text) == pytest.approx(value, rel=digits, abs=0.51 if value > 100 else 0.0)


@pytest.mark.parametrize("more", [{}, {"at": "beside-vllm"}, {"at": "no-baseline"}])
def test_each_machine_has_its_own_numbers_and_what_it_lacks_is_empty(tmp_path, more):
    steps = {name: [row("FM MSE, compile+graph"), row("MeanFlow 100%, compile+graph")] for name in (H200, H100, OTHER)}
    for name, rows in steps.items():
        write_rows(tmp_path, "meanflow-step", rows, gpu=name, **machines.COMPILED)
    large = _engine()
    folder = write_rows(tmp_path, "llm", large, gpu=H100, section="large", kernels="token", **more, **QWEN)
    table = machines.two_machines(folder)
    for line, index in ((machines.LINES[0], 1), (machines.LINES[1], 0)):
        cells = cells_of(table, line.what)
        for shown, name in ((cells[:2], H200), (cells[2:4], H100)):
            found = steps[name][index]
            _is(shown[0], found.timing.median_ms)
            _is(shown[1], found.timing.median_ms / found.floor.ms)
    cells = cells_of(table, "256 prompts; tokens/s")
    assert cells[:2] == ["", ""]
    _is(cells[2], large[0].extra["tokens_per_second"])
    assert len(table.rows) == 3


@pytest.mark.parametrize("missing", SECTIONS)
def test_the_readmes_rows_about_the_engine_are_of_the_newest_machine_that_has_all(tmp_path, missing):
    found = {}
    for name, date in ((H200, "2026-11-02T00:00:00+00:00"), (H100, "2026-11-09T00:00:00+00:00")):
        for section, kernels in SECTIONS:
            if name == H100 and (section, kernels) == missing:
                continue
            (found[name, section, kernels],) = rows = _engine()
            chosen = {"section": section, "kernels": kernels, "prompts": 256}
            write_rows(tmp_path, "llm", rows, gpu=name, date=date, **chosen, **QWEN)
    results = headlines._of_one_machine(read_folder(tmp_path), SECTIONS)
    assert [result.machine for result in results] == [H200] * 3
    (found[H100, *missing],) = rows = _engine()
    chosen = {"section": missing[0], "kernels": missing[1], "prompts": 256}
    folder = write_rows(tmp_path, "llm", rows, gpu=H100, date="2026-11-01T00:00:00+00:00", **chosen, **QWEN)
    table = MarkdownTable(("what", "fullstride", "beside it", "the roofline bound"))
    headlines._serving(table, folder)
    for (cells, sources), section in zip(table.rows, SECTIONS, strict=True):
        assert [source.machine for source in sources] == [H100]
        row = found[H100, *section]
        told = re.fullmatch(r"\*\*([\d,]+) tokens/s\*\* \(([\d,]+) to ([\d,]+)\)", cells[1])
        assert told
        times = (row.timing.quantile(q) for q in (0.5, 0.9, 0.1))
        for cell, time in zip(told.groups(), times, strict=True):
            _is(cell, row.extra["tokens_per_second"] * row.timing.median_ms / time)


def test_what_a_machine_measured_since_of_something_else_does_not_matter(tmp_path):
    for name, day in ((H200, 2), (H100, 9)):
        for section, kernels in SECTIONS:
            chosen = {"section": section, "kernels": kernels, "prompts": 256}
            write_rows(tmp_path, "llm", _engine(), gpu=name, date=f"2026-11-{day:02}T00:00:00+00:00", **chosen, **QWEN)
    other = {"section": "latency", "kernels": "token", "date": "2026-11-20T00:00:00+00:00"}
    folder = write_rows(tmp_path, "llm", _engine(), gpu=H200, **other, **QWEN)
    assert [result.machine for result in headlines._of_one_machine(folder, SECTIONS)] == [H100] * 3


@pytest.mark.parametrize(("rates", "fastest"), [((900.0, 40.0), "vLLM"), ((40.0, 900.0), "transformers, batched")])
def test_the_fastest_that_ran_too_stands_beside_the_engine(tmp_path, rates, fastest):
    names = ("vLLM", "transformers, batched")
    others = [row(name, tokens_per_second=found) for name, found in zip(names, rates, strict=True)]
    for (section, kernels), more in zip(SECTIONS, ({}, {}, {"at": "beside-vllm"}), strict=True):
        chosen = {"section": section, "kernels": kernels, "prompts": 256, **more}
        write_rows(tmp_path, "llm", [*_engine(), *(others if more else [])], gpu=H100, **chosen, **QWEN)
    table = MarkdownTable(("what", "fullstride", "beside it", "the roofline bound"))
    headlines._serving(table, read_folder(tmp_path))
    assert [cells[2] for cells, _ in table.rows] == ["", "", f"{fastest} 900 tokens/s"]


def test_machines_of_which_none_has_all_are_an_error(tmp_path):
    folder = write_rows(tmp_path, "llm", _engine(), gpu=H100, section="small", kernels="plain", **QWEN)
    with pytest.raises(ConfigError, match="no machine has all of .*token"):
        headlines._of_one_machine(folder, SECTIONS)

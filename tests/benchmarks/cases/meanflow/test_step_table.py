from io import StringIO

import pytest
from rich.console import Console

from benchmarks.cases.meanflow.step_table import compare, tables
from benchmarks.harness.results import CaseResult, Row
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing


def row(name: str, backend: str, ms: float, gib: float, batch: int = 64, ratio: float | None = 0.0) -> Row:
    extra = {"name": name, "backend": backend, "batch": batch, "forwards": 3 + (ratio or 0), "errors": {"loss": 2e-4}}
    extra |= {} if ratio is None else {"ratio": ratio}
    return Row(f"{name}, {backend}", Timing(1500.0, (ms,) * 3, int(gib * 2**30)), RooflineBound(ms / 2, 0.1), extra)


def rows() -> list[Row]:
    return [
        row("FM MSE", "eager", 40.0, 5.0),
        row("MeanFlow 100%", "eager", 100.0, 6.0, ratio=1.0),
        row("FM MSE", "compile+graph", 20.0, 2.0),
        row("MeanFlow 100%", "compile+graph", 27.0, 3.0, ratio=1.0),
        row("MeanFlow 25%", "compile+graph", 22.0, 2.5, ratio=0.25),
        row("JVP", "eager", 30.0, 1.0, batch=16, ratio=None),
        row("JVP", "eager", 60.0, 1.0, ratio=None),
    ]


def result(found: list[Row], batch: int = 64) -> CaseResult:
    ceilings = Ceilings(7e14, 4e12, "8192^3 bfloat16", 1, [1.0], [1.0])
    conditions = {"model": "unet", "batch_size": batch, "left_out": []}
    return CaseResult("meanflow-step", "cuda", conditions, {}, ceilings, found, {})


def printed(found: list[Row], sections: tuple[str, ...], batch: int = 64) -> str:
    out = StringIO()
    for table in tables(result(found, batch), sections):
        Console(file=out, width=200).print(table)
    return out.getvalue()


def test_times_are_compared_with_the_fastest_and_memory_with_the_same_backend():
    found = rows()
    compare(found)
    assert [r.extra.get("over_flow_matching") for r in found] == pytest.approx([2, 5, 1, 1.35, 1.1, None, 3])
    assert [r.extra.get("memory_over_flow_matching") for r in found][:5] == pytest.approx([1, 1.2, 1, 1.5, 1.25])
    assert {r.extra.get("flow_matching_by") for r in found} == {"compile+graph", None}
    assert found[5].extra["ms_per_sample"] == pytest.approx(30 / 16)


def test_the_tables_say_it():
    found = rows()
    compare(found)
    text = printed(found, ("ratios", "scaling", "batches"))
    (line,) = [one for one in text.splitlines() if "MeanFlow 100%" in one and "compile+graph" in one and "27.00" in one]
    cells = line.split()
    assert cells[2:6] == ["64", "compile+graph", "27.00", "27-27"]
    assert cells[6:] == ["13.50", "2.00", "1.35", "1.33", "3.00", "1.50", "1.5", "2.0e-04"]
    assert "x FM: of the fastest FM MSE step of this run, by compile+graph" in text
    assert "60.00 (0.50)" in text  # 64 samples of 16 cost half of four times as much
    assert "0.4219" in text


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_of_fewer_samples_than_shares_has_a_table_all_the_same(batch):
    found = [row("MeanFlow 50%", "eager", 8.0, 1.0, batch, 0.5), row("MeanFlow 100%", "eager", 9.0, 1.0, batch, 1.0)]
    found += [row("JVP", "eager", 2.0 * count, 1.0, count, None) for count in range(1, batch + 1)]
    compare(found)
    text = printed(found, ("scaling",), batch)
    assert f"{batch} of {batch}" in text
    assert "0 of" not in text
    assert f"{2.0 * batch:.2f} (1.00)" in text


def test_without_flow_matching_there_are_no_ratios():
    found = rows()[-2:]
    compare(found)
    assert "over_flow_matching" not in found[0].extra
    assert "fastest" not in printed(found, ("ratios",))

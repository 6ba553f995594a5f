"""The plan of several GPUs beside every step of them that was measured."""

from pathlib import Path

import pytest

from benchmarks.harness.results import CaseResult, Row, write_result
from benchmarks.tuning.planned_steps import work_of
from fullstride.meanflow.planning.cost import all_reduce_ms, step_ms
from fullstride.meanflow.planning.fit import fitted
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing
from tests.meanflow.planning.shared_steps import SharedStep, shared_steps
from tests.meanflow.planning.test_fit import RESULTS, WITHIN


def off(row: SharedStep) -> float:
    """How far from what was measured the plan is, as a part of it."""
    kept = fitted()
    return row.predicted_ms(kept.rates, kept.costs) / row.ms - 1


def test_steps_of_several_gpus_are_predicted_where_they_were_measured():
    wrong = {f"{row.file}: {row.name}": off(row) for row in shared_steps(RESULTS) if abs(off(row)) > WITHIN}
    assert wrong == {}


def written(folder: Path, gpu: str, *rows: Row) -> Path:
    conditions = {"model": "unet", "precision": "bf16", "backend": "compile+graph", "batch_size": 64, "averages": 3}
    ceilings = Ceilings(1e15, 1e12, "", 1, [1.0], [1.0])
    environment = {"gpu": {"name": gpu}, "versions": {}}
    return write_result(
        CaseResult("meanflow-scaling", "cuda", conditions, {}, ceilings, list(rows), environment), folder
    )


def row(ms: float, **extra: float | str | None) -> Row:
    return Row(
        f"row of {ms}", Timing(9.0, (ms,), None), RooflineBound(1.0, 1.0), {"model": "unet", "batch": 64, **extra}
    )


def test_a_plan_adds_the_sum_that_was_measured_beside_a_step(tmp_path):
    kept = fitted()
    alone = row(17.0, ratio=1.0, processes=1, kind="none", efficiency=1.0)
    shared = row(18.0, ratio=0.25, processes=2, kind="ddp", efficiency=0.9, transfer_ms=1.75)
    memory = row(900.0, ratio=None, processes=2, kind="fsdp", largest_batch=170)
    written(tmp_path, "NVIDIA H200", alone, shared, memory)
    one, two = shared_steps(tmp_path)
    assert (one.gpus, two.gpus, one.link) == (1, 2, 0.0)
    assert (two.step.whole, two.step.averages, two.step.batch, two.step.ratio) == (True, 3, 64, 0.25)
    work = work_of("unet", half=True)
    # Two GPUs each send as many bytes as there are: half of them in each of two rounds.
    assert two.link == pytest.approx(4 * work.parameters / 1.75e-3)
    assert all_reduce_ms(work.parameters, 2, two.link) == pytest.approx(1.75)
    rates = kept.rates["bf16"]
    assert one.predicted_ms(kept.rates, kept.costs) == pytest.approx(step_ms(work, one.step, rates, kept.costs))
    assert two.predicted_ms(kept.rates, kept.costs) == pytest.approx(step_ms(work, two.step, rates, kept.costs) + 1.75)


def test_another_machines_steps_are_none_of_the_plans(tmp_path):
    written(tmp_path, "Some Other GPU", row(17.0, ratio=1.0, processes=1, kind="none"))
    assert shared_steps(tmp_path) == []
    assert shared_steps(tmp_path / "nowhere") == []

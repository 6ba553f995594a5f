"""The cost model beside every step that was measured."""

import json
from pathlib import Path

import pytest

from benchmarks.report.places import fill_pages, makers
from benchmarks.tuning.plan_fit import write_fitted
from benchmarks.tuning.planned_steps import CHANGES, measured, work_for
from fullstride.meanflow.planning.cost import memory_bytes, step_ms
from fullstride.meanflow.planning.fit import KEPT_FILE, fitted

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
WITHIN = 0.15
ROWS = measured(RESULTS)


def _name(row):
    return f"{row.model}-{row.step.precision}-{row.step.backend}-{row.step.batch}-{row.name}".replace(" ", "_")


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_a_measured_step_is_predicted(row):
    kept = fitted()
    predicted = step_ms(work_for(row), row.step, kept.rates[row.step.precision], kept.costs)
    assert predicted == pytest.approx(row.ms, rel=WITHIN), row.file
    assert memory_bytes(work_for(row), row.step, kept.costs) == pytest.approx(row.memory, rel=WITHIN), row.file


def test_most_rows_are_predicted_and_not_fitted():
    models = {row.model for row in ROWS}
    assert {"unet", "dit_b2", "dit_b4", "song_unet"} <= models
    assert sum(row.fitted for row in ROWS) < len(ROWS) / 3
    # Networks that no factor was fitted to.
    assert {row.model for row in ROWS if row.fitted} == {"unet", "dit_b2"}


def test_the_kept_factors_are_those_of_the_results(tmp_path):
    found = json.loads(write_fitted(RESULTS, tmp_path / "fitted.json").read_text())
    assert found == json.loads(KEPT_FILE.read_text()), "run: fullstride meanflow plan --fit benchmarks/results"
    assert CHANGES in found["fitted to"]


def test_the_planning_page_has_the_predictions():
    page = RESULTS.parents[1] / "docs" / "how-to" / "plan-a-run.md"
    assert fill_pages([page], makers(RESULTS), check=True) == [], "run: python -m benchmarks report tables"


@pytest.mark.parametrize("row", [row for row in ROWS if row.name == "FM MSE"], ids=_name)
def test_operations_are_those_that_the_bench_counted_on_its_gpu(row):
    data = json.loads((RESULTS / row.file).read_text())
    name = f"FM MSE, {row.step.backend}"
    same = (r for r in data["rows"] if (r["name"], r["extra"]["batch"]) == (name, row.step.batch))
    arithmetic = next(same)["floor"]["arithmetic_ms"] / 1e3
    flops = arithmetic * data["ceilings"]["flops"] / 3 / row.step.batch
    assert work_for(row).flops == pytest.approx(flops, rel=1e-6)

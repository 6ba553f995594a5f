"""The step's bench by every backend on a GPU: `python -m pytest tests/gpu/test_bench_step.py`."""

import pytest
import torch

from benchmarks.cases.meanflow import step_setup as bench_step_setup
from benchmarks.cases.meanflow.options import BACKENDS
from benchmarks.cases.meanflow.options import StepOptions as Options
from benchmarks.cases.meanflow.step import run
from benchmarks.harness.results import read_result
from fullstride.measure.timing import TimingPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make few calls: the times are not tested."""
    monkeypatch.setattr(bench_step_setup, "PLAN", TimingPlan(warmup=0, repeats=2, seconds=0.0))


@pytest.mark.parametrize("full_step", [False, True])
def test_every_backend_passes_its_gates_with_its_memory(tmp_path, full_step):
    options = Options(
        model="dit_tiny", batch_size=16, sections=("backends", "profile"), full_step=full_step, only=("100%",)
    )
    result = read_result(run(options, tmp_path))
    assert result["conditions"]["left_out"] == []
    measured = {(row["extra"]["name"], row["extra"]["backend"]): row for row in result["rows"]}
    assert set(measured) == {(name, backend) for name in ("FM MSE", "MeanFlow 100%") for backend in BACKENDS}
    weights = 4 * result["conditions"]["parameters"]
    for row in measured.values():
        # Weights and gradients; of a whole step also AdamW's two moments and three averages.
        assert row["timing"]["peak_bytes"] > (7 if full_step else 2) * weights
    groups = measured["MeanFlow 100%", "eager"]["extra"]["profile"]["groups"]
    assert groups["matmul"] > 0
    assert groups["norm"] > 0
    assert (groups["optimizer"] > 0) == full_step
    assert groups["other"] < 0.2 * sum(groups.values())


def test_the_alternatives_run_or_say_why_not(tmp_path):
    options = Options(model="unet_tiny", batch_size=16, sections=("alternatives",), backends=("eager", "graph"))
    result = read_result(run(options, tmp_path))
    measured = {row["extra"]["name"] for row in result["rows"]}
    assert "H: captured JVP, eager prediction" in measured
    assert "F: the JVP alone" in measured
    assert {entry["name"][0] for entry in result["conditions"]["left_out"]} <= set("BGt")

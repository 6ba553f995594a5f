import json
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cases.meanflow import framework_worker, frameworks
from benchmarks.cases.meanflow.framework_worker import JAX, PYTORCH, measured
from benchmarks.cli.app import app
from benchmarks.harness.budget import reason
from fullstride.meanflow.config.networks import DiTConfig
from fullstride.meanflow.config.presets import MODELS
from fullstride.measure.timing import TimingPlan
from tests.benchmarks.cases.meanflow.quick_bench import quick  # noqa: F401
from tests.helpers.compiled_soon import compiled_soon, flag_xla  # noqa: F401

flag_xla()
pytestmark = pytest.mark.usefixtures("quick", "compiled_soon")
NAMES = ("FM MSE", "MeanFlow 50%")
ROWS = [*(f"{name}, {PYTORCH}" for name in NAMES), f"MeanFlow 50%, {PYTORCH}, two passes"]  # of PyTorch


class Here:
    """Stand-in for a team of one process: it does its job in this one."""

    def __init__(self, jobs):
        (self.job,), self.why = jobs, ""

    def get_ready(self, until, take):
        return True

    def measure(self, until, take):
        try:
            take(measured(self.job, lambda: None))
        except Exception as error:
            self.why = reason(error)

    def end(self):
        pass


class Zeros:
    """Side whose loss is right, and whose gradients are zero."""

    def __init__(self, job, batch):
        with np.load(job.reference) as file:
            self.loss = float(file["loss"])

    def step(self):
        pass

    wait = step

    def found(self, right):
        return self.loss, [0 * gradient for gradient in right.values()], [*right.values()]

    def peak_bytes(self):
        return None

    def notes(self):
        return {}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command on small networks and few steps; its result, and what it wrote."""
    monkeypatch.setattr(framework_worker, "BLOCK", 2)
    monkeypatch.setattr(framework_worker, "PLAN", TimingPlan(warmup=0, repeats=2, seconds=0.0))
    small = partial(DiTConfig, name="dit_b4", patch_size=8, width=16, depth=1, heads=2)
    monkeypatch.setitem(MODELS, "dit_b4", small)

    def run(*arguments, model="dit_b4"):
        given = ["meanflow-jax", "--device", "cpu", "--model", model, "--batch-size", "4", "--ratio", "0.5"]
        result = CliRunner().invoke(app, [*given, *arguments, "--out", str(tmp_path)])
        files = list(tmp_path.glob(f"meanflow-jax--{model}--*.json"))
        return result, json.loads(files[0].read_text()) if files else None

    return run


@pytest.fixture
def here(command, monkeypatch):
    """The command with all its steps in this process."""
    monkeypatch.setattr(frameworks, "Worker", lambda work, beside, job: job)
    monkeypatch.setattr(frameworks, "Team", Here)
    return command


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("dit_b4", "bf16"),
        pytest.param("dit_b4", "fp32", marks=pytest.mark.thorough),
        pytest.param("unet_tiny", "bf16", marks=pytest.mark.thorough),
    ],
)
def test_both_frameworks_are_right_and_timed(here, model, precision):
    result, found = here("--precision", precision, model=model)
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in found["rows"]}
    assert sorted(rows) == sorted([*ROWS, f"MeanFlow 50%, {JAX}", f"FM MSE, {JAX}"])
    largest = 1e-5 if precision == "fp32" else 5e-2
    assert 0 < max(found["gate"].values()) < largest
    for name in NAMES:
        torch_ms, jax_ms = (rows[f"{name}, {by}"]["timing"]["median_ms"] for by in (PYTORCH, JAX))
        extra, flow = rows[f"{name}, {JAX}"]["extra"], rows[f"FM MSE, {JAX}"]["timing"]["median_ms"]
        assert extra["over_pytorch"] == pytest.approx(jax_ms / torch_ms)
        assert extra["over_flow_matching"] == pytest.approx(jax_ms / flow)
        assert extra["compile_s"] > 0
    bounds = [rows[f"{name}, {JAX}"]["floor"]["arithmetic_ms"] for name in NAMES]
    assert bounds[1] / bounds[0] == pytest.approx(3.5 / 3)


def test_a_wrong_step_is_not_timed_and_costs_nothing_that_is_right(here, monkeypatch):
    monkeypatch.setitem(framework_worker.SIDES, JAX, f"{__name__}:Zeros")
    result, found = here()
    assert result.exit_code == 1
    assert "FM MSE, JAX: GateError: gradients: relative error 1.00e+00" in result.output
    assert [row["name"] for row in found["rows"]] == ROWS


def test_without_time_nothing_is_begun(here):
    result, found = here("--seconds", "0")
    assert result.exit_code == 2
    assert found is None
    assert "left out: MeanFlow 50%, JAX: no time" in result.output


@pytest.mark.thorough
def test_each_step_has_a_process_of_its_own(command, monkeypatch):
    monkeypatch.undo()  # a process of its own has the real network
    result, found = command("--jobs", "2", model="unet_tiny")
    assert result.exit_code == 0, result.output
    assert {row["extra"]["compiled_at_once"] for row in found["rows"]} == {2}
    code = found["environment"]["code"]
    assert {"fullstride/step/jax/train_step.py", "fullstride/step/torch/train_step.py"} <= code.keys()

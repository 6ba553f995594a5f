"""Step benchmark with little work: the times are not tested."""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.cases.meanflow import step_gate as bench_step_gate
from benchmarks.cases.meanflow import step_setup as bench_step_setup
from benchmarks.cases.meanflow.options import StepOptions as Options
from benchmarks.cases.meanflow.step_gate import Exact
from benchmarks.cases.meanflow.step_run import StepBench
from benchmarks.cases.meanflow.step_setup import StepSetup, make_setup
from fullstride.meanflow.config.networks import DiTConfig, UNetConfig
from fullstride.meanflow.config.presets import MODELS
from fullstride.measure.timing import TimingPlan


@pytest.fixture
def quick(monkeypatch):
    """Measure one call per row, with small networks, few checked samples and small ceilings."""
    small = partial(UNetConfig, name="unet_tiny", channels=8, channel_mult=[1, 2], num_blocks=1)
    monkeypatch.setitem(MODELS, "unet_tiny", partial(small, attention_resolutions=[]))
    monkeypatch.setitem(MODELS, "dit_tiny", partial(DiTConfig, name="dit_tiny", width=16, depth=1, heads=2))
    plan = TimingPlan(warmup=0, repeats=1, seconds=0.0)
    monkeypatch.setattr(bench_step_setup, "PLAN", plan)
    monkeypatch.setattr(bench_step_setup, "SLOW", plan)
    monkeypatch.setattr(bench_step_gate, "SAMPLES", 3)


def setup(**options: Any) -> StepSetup:
    """Build the setup of the smallest network."""
    return make_setup(Options(**{"device": "cpu", "model": "dit_tiny", "batch_size": 5} | options))


def bench(**options: Any) -> StepBench:
    """Return a benchmark with nothing measured yet."""
    own = setup(**options)
    return StepBench(own, Exact.of(own))


def gradient(own: StepSetup) -> torch.Tensor:
    """Return the gradient in the network."""
    return torch.cat([p.grad.flatten() for p in own.model.parameters() if p.grad is not None])

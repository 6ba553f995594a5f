"""Benchmarks with little work: the times are not tested."""

import pytest

from benchmarks.cases.jvp import timing as bench_timing
from fullstride.measure.timing import TimingPlan


@pytest.fixture
def quick(monkeypatch):
    """Measure one call per row, with small ceilings."""
    monkeypatch.setattr(bench_timing, "PLAN", TimingPlan(warmup=0, repeats=1, seconds=0.0))

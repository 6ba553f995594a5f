"""Benchmarks with little work: the times are not tested."""

import pytest

from benchmarks.cases.jvp import timing as bench_timing
from fullstride.measure.timing import TimingPlan


@pytest.fixture
def quick(monkeypatch):
    """Measure one call per row, with small ceilings."""
    monkeypatch.setattr(bench_timing, "PLAN", TimingPlan(warmup=0, repeats=1, seconds=0.0))
    monkeypatch.setattr("fullstride.measure.roofline.GEMM_SIZE", {"cpu": 64})
    monkeypatch.setattr("fullstride.measure.roofline.COPY_BYTES", {"cpu": 1 << 16})

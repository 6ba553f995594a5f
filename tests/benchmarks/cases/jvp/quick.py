"""Benches of little work: what is tested is not the times."""

import pytest

from benchmarks.cases.jvp import timing as bench_timing
from fullstride.measure.timing import TimingPlan


@pytest.fixture
def quick(monkeypatch):
    """One call a row, and small ceilings."""
    monkeypatch.setattr(bench_timing, "PLAN", TimingPlan(warmup=0, repeats=1, seconds=0.0))
    monkeypatch.setattr("fullstride.measure.roofline.GEMM_SIZE", {"cpu": 64})
    monkeypatch.setattr("fullstride.measure.roofline.COPY_BYTES", {"cpu": 1 << 16})

"""Benches of little work: what is tested is not the times."""

import pytest

from fullstride.bench.timing import Plan
from fullstride.jvp import bench_timing


@pytest.fixture
def quick(monkeypatch):
    """One call a row, and small ceilings."""
    monkeypatch.setattr(bench_timing, "PLAN", Plan(warmup=0, repeats=1, seconds=0.0))
    monkeypatch.setattr("fullstride.bench.floor.GEMM_SIZE", {"cpu": 64})
    monkeypatch.setattr("fullstride.bench.floor.COPY_BYTES", {"cpu": 1 << 16})

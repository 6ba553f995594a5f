"""The benches of `fullstride.jvp` on a GPU: `python -m pytest tests/gpu/test_jvp_bench.py`."""

import pytest
import torch

from fullstride.bench.results import read_result
from fullstride.bench.timing import Plan
from fullstride.jvp import bench_attention, bench_common, bench_norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("implementation", ["plain", "triton"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("bench", [bench_attention, bench_norms], ids=["attention", "norms"])
def test_odd_sizes_pass_the_gate_and_are_captured(bench, precision, implementation, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_common, "PLAN", Plan(warmup=0, repeats=2, seconds=0.0))
    path = bench.run(device="cuda", precision=precision, implementation=implementation, shapes="odd", out=tmp_path)
    result = read_result(path)
    assert result["rows"]
    for row in result["rows"]:
        assert row["timing"]["median_ms"] > 0
        assert row["timing"]["peak_bytes"] > 0
    assert {key.split()[0] for key in result["gate"]} >= {"bf16", "fp16", "fp32"}

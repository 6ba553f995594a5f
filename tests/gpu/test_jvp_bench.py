"""The benches of `fullstride.jvp` on a GPU: `python -m pytest tests/gpu/test_jvp_bench.py`."""

import pytest
import torch

from benchmarks.cases.jvp import attention as bench_attention
from benchmarks.cases.jvp import norms as bench_norms
from benchmarks.cases.jvp import timing as bench_timing
from benchmarks.cases.jvp.options import AttentionOptions, NormsOptions
from benchmarks.harness.results import read_result
from fullstride.measure.timing import TimingPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {bench_attention: AttentionOptions, bench_norms: NormsOptions}


@pytest.mark.parametrize("implementation", ["plain", "triton"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("bench", [bench_attention, bench_norms], ids=["attention", "norms"])
def test_odd_sizes_pass_the_gate_and_are_captured(bench, precision, implementation, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_timing, "PLAN", TimingPlan(warmup=0, repeats=2, seconds=0.0))
    options = {"device": "cuda", "precision": precision, "implementation": implementation, "shapes": "odd"}
    result = read_result(bench.BENCH.run(OPTIONS[bench](**options, seconds=600.0, jobs=4), tmp_path))
    assert not [e for e in result["conditions"]["left_out"] if e["who"] in ("ours", "all")]
    for row in result["rows"]:
        timing, extra = row["timing"], row["extra"]
        assert timing["median_ms"] > 0
        # What is there before and what comes out is the least that a pass takes.
        assert timing["peak_bytes"] >= 0.99 * extra["tensor_bytes"]
        if extra["who"] == "ours":
            assert extra["calls_in_graph"] > 0
    assert {key.split()[0] for key in result["gate"]} >= {"bf16", "fp16", "fp32"}

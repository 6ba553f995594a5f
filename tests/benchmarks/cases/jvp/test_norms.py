import pytest
import torch

from benchmarks.cases.jvp import norms as bench_norms
from benchmarks.cases.jvp import norms as bench_norms_gate
from benchmarks.cases.jvp.common import make_setup
from benchmarks.cases.jvp.norms import BENCH, Problem, eager, gate, results
from benchmarks.cases.jvp.options import NormsOptions
from benchmarks.cases.jvp.shapes import NORMS_SMALL, NormShape
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError
from tests.benchmarks.cases.jvp.quick import quick  # noqa: F401, a fixture

PASSES = [(kind, who) for kind in ("forward", "detached", "through") for who in ("ours", "eager")]
SMALL = [NormShape("group_norm", (2, 6, 5, 5), 3, "silu", True), NormShape("ada_layer_norm", (3, 5, 16))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_pass_is_measured_in_passes_over_memory(quick, monkeypatch, tmp_path, capsys, precision):  # noqa: F811
    monkeypatch.setattr(bench_norms, "NORMS_SMALL", SMALL)
    monkeypatch.setitem(bench_norms.SHAPES, "small", SMALL)
    path = BENCH.run(NormsOptions(device="cpu", precision=precision, seconds=60.0), tmp_path)
    result = read_result(path)
    assert [(r["extra"]["kind"], r["extra"]["who"]) for r in result["rows"]] == PASSES * 2
    one = 2 * 6 * 25 * (2 if precision == "bf16" else 4)
    assert [r["extra"]["bytes"] for r in result["rows"][:6]] == [one * n for n in (4, 4, 3, 3, 6, 6)]
    for r in result["rows"]:
        assert r["floor"]["bound"] == "memory"
        assert r["floor"]["ms"] > 0
        assert r["timing"]["median_ms"] > 0
        assert bool(r["extra"]["errors"]) == (r["extra"]["who"] == "ours")
    eps = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float32).eps
    for name in ("y", "ty"):
        assert 0 < result["rows"][0]["extra"]["errors"][name]["ours"] < 4 * eps
    assert {key.split()[0] for key in result["gate"]} == {"bf16", "fp16", "fp32"}
    printed = capsys.readouterr().out
    for text in ("GB/s", "group_norm 2x6x5x5 silu channels_last", "copy", "written to"):
        assert text in printed


@pytest.mark.parametrize("shape", NORMS_SMALL, ids=str)
def test_the_gate_compares_with_torchs_own_where_that_is_right(quick, shape):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "plain", 60.0)
    problem = Problem.draw(shape, setup)
    if shape.channels_last:
        assert problem.x.is_contiguous(memory_format=torch.channels_last)
    errors = gate(setup, problem, "through")
    parameters = {"dweight"} if shape.op == "rms_norm" else {"dweight", "dbias"}
    assert set(errors) == {"y", "ty", "dx", "dtx"} | parameters
    assert ("eager" in errors["dx"]) == ("layer" not in shape.op)
    torchs_own = results(eager, problem.double(), "through")
    ours = results(bench_norms_gate.ours("plain", True), problem.double(), "through")
    for name in set(ours) - ({"dx"} if "layer" in shape.op else set()):
        torch.testing.assert_close(ours[name], torchs_own[name], rtol=1e-8, atol=1e-8)


def test_a_wrong_norm_is_not_timed(quick, monkeypatch):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "plain", 60.0)
    problem = Problem.draw(SMALL[1], setup)
    right = bench_norms_gate.ours

    def off(implementation, through):
        run = right(implementation, through)

        def called(problem):
            y, ty = run(problem)
            return y, ty if problem.x.dtype == torch.float64 else ty * 1.001

        return called

    monkeypatch.setattr(bench_norms_gate, "ours", off)
    with pytest.raises(GateError, match="ada_layer_norm 3x5x16 ty: relative error 1.00e-03"):
        gate(setup, problem, "through")


def test_names_that_there_are_not(tmp_path):
    options = {"device": "cpu", "implementation": "auto", "seconds": 1.0}
    with pytest.raises(ConfigError, match="--precision=tf32: expected one of"):
        BENCH.run(NormsOptions(**options, precision="tf32"), tmp_path)
    with pytest.raises(ConfigError, match="--shapes=speed: expected one of"):
        BENCH.run(NormsOptions(**options, precision="fp32", shapes="speed"), tmp_path)

import pytest
import torch

from fullstride.bench.gate import GateError
from fullstride.bench.results import read_result
from fullstride.errors import ConfigError
from fullstride.jvp import bench_attention
from fullstride.jvp.bench_attention import _gate, ours, run, vanilla
from fullstride.jvp.bench_attention_gate import QUERIES, Problem, exact, gate, results
from fullstride.jvp.bench_common import make_setup
from fullstride.jvp.shapes import AttentionShape
from tests.jvp import plain_ops
from tests.jvp.quick import quick  # noqa: F401, a fixture

PASSES = [
    ("forward", "ours"),
    ("forward", "vanilla"),
    ("primal", "library"),
    ("detached", "ours"),
    ("detached", "library"),
    ("through", "ours"),
    ("through", "vanilla"),
]
SMALL = [AttentionShape("a", 2, 3, 33, 16), AttentionShape("b", 1, 2, 20, 8)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_pass_is_measured_beside_its_floor(quick, monkeypatch, tmp_path, capsys, precision):  # noqa: F811
    monkeypatch.setattr(bench_attention, "SMALL", SMALL)
    path = run(device="cpu", precision=precision, implementation="auto", shapes=None, out=tmp_path)
    result = read_result(path)
    assert path.name.startswith(f"jvp-attention--{precision}--auto--")
    assert [(r["extra"]["kind"], r["extra"]["who"]) for r in result["rows"]] == PASSES * 2
    work = [r["extra"]["gflop"] for r in result["rows"]]
    product = 2 * 2 * 3 * 33 * 33 * 16 / 1e9
    assert work[:7] == pytest.approx([product * n for n in (6, 6, 2, 5, 5, 15, 15)])
    for r in result["rows"]:
        assert r["timing"]["median_ms"] > 0
        assert bool(r["extra"]["errors"]) == (r["extra"]["who"] == "ours")
    assert set(result["rows"][5]["extra"]["errors"]) == {"dq", "dk", "dv", "dtq", "dtk", "dtv"}
    eps = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float32).eps
    for name, errors in result["rows"][0]["extra"]["errors"].items():
        assert name in ("o", "to")
        assert 0 < errors["ours"] < 8 * eps
        assert 0 < errors["eager"] < 16 * eps
    assert {key.split()[0] for key in result["gate"]} == {"bf16", "fp16", "fp32"}
    printed = capsys.readouterr().out
    for text in ("TFLOP/s", "a B2 H3 L33 D16", "eager's", "dtv", "written to"):
        assert text in printed


@pytest.mark.parametrize("shape", [s for s in bench_attention.COMPARABLE if s.dim <= 96], ids=str)
def test_odd_sizes_pass_the_gate(quick, shape):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "auto")
    for through in (True, False):
        errors = _gate(setup, Problem.draw(shape, setup), through)
        assert len(errors) == (8 if through else 5)
        assert all(e["ours"] < 1e-5 for e in errors.values())


def test_the_reference_is_exact_in_pieces_and_for_shared_keys(monkeypatch, seed):
    monkeypatch.setattr("fullstride.jvp.bench_attention_gate.QUERIES", 7)
    assert QUERIES > 7
    g = torch.Generator().manual_seed(seed)
    shape = AttentionShape("shared", 2, 4, 17, 8, keys=11, kv_heads=2, dim_v=4)
    draw = lambda size: torch.randn(size, generator=g, dtype=torch.float64)  # noqa: E731
    inputs, gradients = [draw(s) for s in (shape.q, shape.k, shape.v) * 2], [draw((2, 4, 17, 4)) for _ in range(2)]
    problem = Problem(shape, inputs, gradients)

    def written_out(*inputs):
        o, to, *_ = torch.func.jvp(
            lambda q, k, v: plain_ops.attention(q, k, v, enable_gqa=True), inputs[:3], inputs[3:]
        )
        return o, to

    for through in (True, False):
        whole = results(written_out, problem, through)
        for at in problem.ends:
            found, expected = exact(problem.part(at), through), problem.cut(whole, at)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert problem.ends == [(0, 0), (1, 1)]
    assert problem.part((1, 1)).inputs[0].shape == (1, 2, 17, 8)


def test_a_wrong_result_is_not_timed(quick):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "auto")
    problem, right = Problem.draw(SMALL[0], setup), ours(setup)

    def off(*inputs):
        o, to = right(*inputs)
        assert to is not None
        return o, 1.001 * to

    def no_gradient(*inputs):
        o, to = right(*inputs)
        assert to is not None
        return o, to.detach() + 0.9 * (to - to.detach())

    assert gate(right, vanilla, problem, True)["to"]["ours"] < 1e-5
    for run_, name in ((off, "to"), (no_gradient, "d")):
        with pytest.raises(GateError, match=f"a B2 H3 L33 D16 {name}.*: relative error"):
            gate(run_, vanilla, problem, True)


def test_what_does_not_fit_is_left_out_and_said(quick, capsys):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "plain")
    assert bench_attention.rows(setup, [AttentionShape("huge", 1, 1, 40_000, 8)]) == []
    assert "left out: huge B1 H1 L40000 D8" in capsys.readouterr().err


def test_names_that_there_are_not(tmp_path):
    options = {"device": "cpu", "implementation": "auto"}
    with pytest.raises(ConfigError, match="--precision=fp8: expected one of"):
        run(**options, precision="fp8", shapes=None, out=tmp_path)
    with pytest.raises(ConfigError, match="--shapes=big: expected one of"):
        run(**options, precision="fp32", shapes="big", out=tmp_path)

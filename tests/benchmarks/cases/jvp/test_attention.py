import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from benchmarks.cases.jvp import attention as bench_attention
from benchmarks.cases.jvp.attention import BENCH, _gate
from benchmarks.cases.jvp.attention_gate import (
    PEER,
    QUERIES,
    Problem,
    dual_ways,
    exact,
    gate,
    libraries,
    ours,
    results,
    vanilla,
    work,
)
from benchmarks.cases.jvp.common import make_setup
from benchmarks.cases.jvp.options import AttentionOptions
from benchmarks.cases.jvp.shapes import AttentionShape
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.jvp.attention.op import attention_dual
from fullstride.measure.gate import GateError
from tests.benchmarks.cases.jvp.quick import quick  # noqa: F401, a fixture
from tests.jvp import plain_ops

PASSES = [
    ("forward", "ours"),
    ("forward", "vanilla"),
    ("primal", "library"),
    ("detached", "ours"),
    ("detached", "vanilla"),
    ("detached", "library"),
    ("through", "ours"),
    ("through", "vanilla"),
]
SMALL = [AttentionShape("a", 2, 3, 33, 16), AttentionShape("b", 1, 2, 20, 8)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_pass_is_measured_beside_its_floor(quick, monkeypatch, tmp_path, capsys, precision):  # noqa: F811
    monkeypatch.setitem(bench_attention.SHAPES, "small", SMALL)
    path = BENCH.run(AttentionOptions(device="cpu", precision=precision, seconds=60.0), tmp_path)
    result = read_result(path)
    assert path.name.startswith(f"jvp-attention--{precision}--auto--")
    assert [(r["extra"]["kind"], r["extra"]["who"]) for r in result["rows"]] == PASSES * 2
    work = [r["extra"]["gflop"] for r in result["rows"]]
    product = 2 * 2 * 3 * 33 * 33 * 16 / 1e9
    assert work[:8] == pytest.approx([product * n for n in (6, 6, 2, 5, 5, 5, 15, 15)])
    for r in result["rows"]:
        assert r["timing"]["median_ms"] > 0
        assert bool(r["extra"]["errors"]) == (r["extra"]["who"] == "ours")
    assert set(result["rows"][6]["extra"]["errors"]) == {"dq", "dk", "dv", "dtq", "dtk", "dtv"}
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
    setup = make_setup(torch.device("cpu"), "fp32", "auto", 60.0)
    for through in (True, False):
        errors = _gate(setup, Problem.draw(shape, setup), through)
        assert len(errors) == (8 if through else 5)
        assert all(e["ours"] < 1e-5 for e in errors.values())


def test_the_reference_is_exact_in_pieces_and_for_shared_keys(monkeypatch, seed):
    monkeypatch.setattr("benchmarks.cases.jvp.attention_gate.QUERIES", 7)
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
    setup = make_setup(torch.device("cpu"), "fp32", "auto", 60.0)
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


def test_a_pass_counts_what_it_reads_writes_and_holds(quick):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "bf16", "auto", 60.0)
    shape = AttentionShape("a", 2, 4, 6, 8, keys=10, kv_heads=2)
    problem = Problem.draw(shape, setup)
    q, kv = 2 * 2 * 4 * 6 * 8, 2 * 2 * 2 * 10 * 8  # bytes of q, o and their like, and of k, v and theirs
    primals = q + 2 * kv
    counts = {
        ("forward", "ours"): (2 * primals + 2 * q, 2 * primals, 2 * primals + 2 * q),
        ("primal", "flash"): (primals + q, primals, primals + q),
        # q, k, v, o, its gradient, and q's, k's, v's; the inputs' tangents are there, too
        ("detached", "ours"): (2 * primals + 2 * q, 2 * primals + q, 3 * primals + 2 * q),
        ("detached", "flash"): (2 * primals + 2 * q, primals + q, 2 * primals + 2 * q),
        ("through", "ours"): (4 * primals + 4 * q, 2 * primals + 2 * q, 4 * primals + 4 * q),
    }
    for (kind, who), expected in counts.items():
        found = work(problem, kind, who)
        assert (found.moved, found.given, found.held) == expected
    assert work(problem, "through", "vanilla").needs == 14 * 2 * 4 * 6 * 10 * 2
    assert work(problem, "through", "ours").needs == 0


def test_the_peer_is_asked_with_duals_where_it_is_installed(quick, monkeypatch):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "bf16", "auto", 60.0)
    shape, odd = AttentionShape("a", 1, 2, 64, 32), AttentionShape("b", 1, 2, 64, 80)
    assert PEER not in dual_ways(setup, shape, through=False)
    package, module = ModuleType(PEER), ModuleType(f"{PEER}.jvp_attention")

    def fwd_dual(*duals):
        (q, tq), (k, tk), (v, tv) = (forward_ad.unpack_dual(x) for x in duals)
        assert None not in (tq, tk, tv)
        o, to = attention_dual(q, k, v, tq, tk, tv)
        assert to is not None
        return forward_ad.make_dual(o, to)

    vars(module)["JVPAttn"] = SimpleNamespace(fwd_dual=fwd_dual)
    monkeypatch.setitem(sys.modules, PEER, package)
    monkeypatch.setitem(sys.modules, f"{PEER}.jvp_attention", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == PEER or None)
    gpu = make_setup(torch.device("cpu"), "bf16", "auto", 60.0)
    object.__setattr__(gpu, "device", torch.device("cuda"))
    assert set(libraries(gpu)) == {"flash", "cudnn"}
    assert PEER not in dual_ways(gpu, odd, through=False)
    assert PEER not in dual_ways(gpu, shape, through=True)
    problem = Problem.draw(shape, setup)
    found = dual_ways(gpu, shape, through=False)[PEER](*problem.inputs)
    torch.testing.assert_close(found, attention_dual(*problem.inputs), rtol=0, atol=0)


def test_the_peer_has_its_errors_and_what_is_wrong_of_it_is_not_timed(quick, monkeypatch):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "bf16", "auto", 60.0)

    def passes(way):
        both = {"ours": ours(setup, tangent_grad=False), PEER: way}
        monkeypatch.setattr(bench_attention, "dual_ways", lambda *_, through: dict(both) if not through else {})
        rows = BENCH.measured(setup, SMALL[0])
        theirs = [vars(r) for r in rows if vars(r).get("who", vars(r).get("extra", {}).get("who")) == PEER]
        assert len(rows) == 6
        return theirs

    for row, names in zip(passes(attention_dual), (("o", "to"), ("dq", "dk", "dv")), strict=True):
        assert tuple(row["extra"]["errors"]) == names
        assert all(0 < error["ours"] < 0.05 for error in row["extra"]["errors"].values())

    def half(*inputs):
        o, to = attention_dual(*inputs)
        assert to is not None
        return o, to / 2

    for left, kind in zip(passes(half), ("forward", "detached"), strict=True):
        off = left["why"].partition(" to: relative error ")[2].partition(",")[0]
        assert (left["kind"], float(off)) == (kind, pytest.approx(0.5, rel=0.02))


def test_what_does_not_fit_is_left_out_and_said(quick, monkeypatch, tmp_path, capsys):  # noqa: F811
    setup = make_setup(torch.device("cpu"), "fp32", "plain", 60.0)
    (huge,) = BENCH.measured(setup, AttentionShape("huge", 1, 1, 40_000, 8))
    assert vars(huge) == {"shape": "huge B1 H1 L40000 D8", "kind": "all", "who": "ours", "why": "no memory"}
    monkeypatch.setitem(bench_attention.SHAPES, "small", SMALL[:1])
    monkeypatch.setattr(
        "benchmarks.cases.jvp.attention_gate.MATRICES", {"forward": 1 << 40, "detached": 0, "through": 0}
    )
    options: Any = {"device": "cpu", "precision": "fp32", "implementation": "auto", "shapes": "small"}
    result = read_result(BENCH.run(AttentionOptions(**options, seconds=60.0), tmp_path))
    assert [(r["extra"]["kind"], r["extra"]["who"]) for r in result["rows"]] == [p for p in PASSES if p != PASSES[1]]
    name = {"shape": "a B2 H3 L33 D16", "kind": "forward", "who": "vanilla"}
    assert result["conditions"]["left_out"] == [{**name, "why": "no memory"}]
    assert "left out: a B2 H3 L33 D16 forward, vanilla: no memory" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="jvp-attention: no row was measured, expected one"):
        BENCH.run(AttentionOptions(**options, seconds=0.0), tmp_path)
    assert "left out: errors fp32, ours: no time" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_only_what_is_wrong_of_ours_ends_in_an_error(quick, monkeypatch, tmp_path, capsys):  # noqa: F811
    def refuses(*_):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(bench_attention.SHAPES, "small", SMALL)
    monkeypatch.setattr("benchmarks.cases.jvp.attention_gate.library", refuses)
    monkeypatch.setattr(bench_attention, "library", refuses)
    options = {
        "device": "cpu",
        "precision": "fp32",
        "implementation": "auto",
        "shapes": "small",
        "seconds": 60.0,
        "jobs": 8,
    }
    monkeypatch.setattr(bench_attention, "vanilla", vanilla_of_its_own)
    result = read_result(BENCH.run(AttentionOptions(**options), tmp_path))
    assert {r["extra"]["who"] for r in result["rows"]} == {"ours"}
    assert "primal, library: RuntimeError: no kernel for this" in capsys.readouterr().out
    right = bench_attention.ours
    wrong = SMALL[0]

    def off(setup, through):
        run_ = right(setup, through)

        def called(*inputs):
            o, to = run_(*inputs)
            assert to is not None
            return o, to * (1.001 if inputs[0].shape == wrong.q else 1)

        return called

    monkeypatch.setattr(bench_attention, "ours", off)
    with pytest.raises(GateError, match="a B2 H3 L33 D16 all: GateError: a B2 H3 L33 D16 to: relative error"):
        BENCH.run(AttentionOptions(**options), tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert {r["extra"]["shape"] for r in read_result(path)["rows"]} == {"b B1 H2 L20 D8"}


def vanilla_of_its_own(*inputs):
    o, to, *_ = torch.func.jvp(plain_ops.attention, inputs[:3], inputs[3:])
    return o, to


def test_names_that_there_are_not(tmp_path):
    options = {"device": "cpu", "implementation": "auto", "seconds": 1.0}
    with pytest.raises(ConfigError, match="--precision=fp8: expected one of"):
        BENCH.run(AttentionOptions(**options, precision="fp8"), tmp_path)
    with pytest.raises(ConfigError, match="--shapes=big: expected one of"):
        BENCH.run(AttentionOptions(**options, precision="fp32", shapes="big"), tmp_path)

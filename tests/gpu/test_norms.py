"""The dual norms' kernels on a GPU, every format and layout: `python -m pytest tests/gpu/test_norms.py`."""

import dataclasses
from typing import Any

import pytest
import torch

from fullstride.jvp import group_norm_dual
from fullstride.jvp.norms import group_norm, naive, rows
from fullstride.jvp.norms.group_configs import GroupConfig
from fullstride.jvp.norms.row_configs import RowConfig
from tests.jvp.norms.cases import EPS, Case, Inputs, reference_dual, reference_gradients, relative_error
from tests.jvp.norms.test_shift import drawn, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NO_TANGENT = frozenset({"tx", "tweight", "tbias"})
PARTS = [frozenset(), frozenset({"tweight", "tbias"}), frozenset({"tx"}), NO_TANGENT]
ROW_OPS = ("layer_norm", "rms_norm", "ada_layer_norm")
ROWS = [Case(op, (3, 37, 384), absent=absent) for op in ROW_OPS for absent in PARTS]
ROWS += [Case(op, shape) for op in ROW_OPS for shape in ((2, 5, 1152), (2, 7, 100), (65, 33), (1, 3, 5000))]
LAYOUTS = [(act, last) for act in (None, "silu") for last in (False, True)]
GROUPS = [
    Case("group_norm", shape, groups, act, last)
    for shape, groups in (
        ((3, 128, 32, 32), 32),
        ((2, 512, 32, 32), 32),
        ((2, 320, 16, 16), 32),
        ((2, 64, 7, 7), 16),
        ((1, 64, 150, 150), 8),
    )
    for act, last in LAYOUTS
]
GROUPS += [Case("group_norm", (2, 64, 16, 16), 16, *LAYOUTS[i], absent) for i, absent in enumerate(PARTS)]
GROUPS += [Case("group_norm", (2, 32, 4, 5, 6), 8, "silu", True), Case("group_norm", (2, 24, 1, 1), 4, None)]
CASES = [*ROWS, *GROUPS]
SOME = [ROWS[0], ROWS[4], ROWS[8], GROUPS[0], GROUPS[3], GROUPS[7], GROUPS[16], GROUPS[19]]
# Twice the rounding of a result's format; of a sum of thousands of terms in fp32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill outputs with NaN first, so that unwritten elements show."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


def module_of(case: Case):
    return group_norm if case.op == "group_norm" else rows


def on_gpu(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, **{k: a.cuda() for k, a in vars(inputs).items() if isinstance(a, torch.Tensor)})


def results(inputs: Inputs, detached: bool = False, config=None) -> list[torch.Tensor | None]:
    """y, ty and all gradients, from the kernels."""
    module = module_of(inputs.case)
    y, ty, *moments = inputs.forward(module, config=config)
    return [y, ty, *inputs.backward(module, moments, detached or inputs.case.absent >= NO_TANGENT, config=config)]


def check(inputs: Inputs, detached: bool = False, config=None) -> None:
    detached = detached or inputs.case.absent >= NO_TANGENT
    exact = inputs.to(torch.float64)
    expected = [*reference_dual(exact), *reference_gradients(exact, detached)]
    found = results(on_gpu(inputs), detached, config)
    assert found[0] is not None
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        if got is not None:
            assert relative_error(got, want) < TOLERANCE[got.dtype], i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_full_backward_agree_with_fp64(case, dtype):
    check(case.draw(CASES.index(case), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_detached_backward_agrees_with_fp64(case, dtype):
    check(case.draw(CASES.index(case), dtype), detached=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        GroupConfig(1, 256, 4),
        GroupConfig(4, 256, 8),
        GroupConfig(1, 240, 4, pieces=15),
        GroupConfig(4, 256, 4, pieces=8, packed=True, registers=128),
        GroupConfig(2, 64, 4, 3),
        GroupConfig(4, 32, 4, 2, chunks=5),
    ],
    ids=["on_chip", "side_by_side", "in_pieces", "packed", "walked", "split"],
)
def test_every_way_to_launch_group_norm(config, dtype, last, seed):
    check(Case("group_norm", (2, 24, 15, 16), 6, "silu", last).draw(seed, dtype), config=config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        RowConfig(128, 8, 4, 10**9),
        RowConfig(256, 1, 4, 33, 3),
        RowConfig(64, 2, 1, 7, keep=True),
        RowConfig(256, 2, 8, 5, 2),
    ],
    ids=["rows_in_warps", "rows_across_warps", "kept", "two_rows"],
)
@pytest.mark.parametrize("case", [ROWS[0], ROWS[4], ROWS[8], Case("ada_layer_norm", (3, 37, 300))], ids=str)
def test_every_way_to_launch_rows(config, case, dtype, seed):
    check(case.draw(seed, dtype), config=config)
    check(case.draw(seed, dtype), detached=True, config=config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_mean_a_thousand_times_the_deviation(case, dtype, seed):
    """In bf16 x is then a few steps of 4 or 8; what the kernels are given is what counts."""
    inputs = case.draw(seed, torch.float32)
    inputs = dataclasses.replace(inputs, x=(inputs.x + 1000)).to(dtype)
    exact = inputs.to(torch.float64)
    found = on_gpu(inputs).forward(module_of(case))
    for got, want in zip(found[:2], reference_dual(exact), strict=True):
        assert relative_error(got, want) < max(1e-3, TOLERANCE[dtype])


@pytest.mark.parametrize("case", SOME, ids=str)
def test_twice_the_same_bits(case, seed):
    inputs = on_gpu(case.draw(seed, torch.bfloat16))
    for a, b in zip(results(inputs), results(inputs), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_no_less_exact_than_plain_operations(case, dtype, seed):
    """At most twice the error of the naive form in the same format, all results taken together."""
    inputs = case.draw(seed, dtype)
    exact = inputs.to(torch.float64)
    expected = [*reference_dual(exact), *reference_gradients(exact)]
    given = on_gpu(inputs)
    y, ty, *moments = given.forward(naive)
    plain = [y, ty, *given.backward(naive, moments)]

    def error(found: list[torch.Tensor | None]) -> float:
        return sum(relative_error(a, b) for a, b in zip(found, expected, strict=True) if a is not None)

    assert error(results(given)) < 2 * error(plain)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_captured_graph_follows_its_inputs(case):
    inputs = on_gpu(case.draw(0, torch.bfloat16))
    results(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(inputs)
    fresh = on_gpu(case.draw(1, torch.bfloat16))
    for name, old in vars(inputs).items():
        if isinstance(old, torch.Tensor):
            old.copy_(vars(fresh)[name])
    graph.replay()
    for got, want in zip(found, results(fresh), strict=True):
        assert got is None or want is None or torch.equal(got, want)


# Groups on the chip, in pieces and padded, and groups that no chip holds.
SHIFTED = [((3, 128, 32, 32), 32), ((5, 384, 8, 8), 32), ((2, 36, 9, 7), 3), ((1, 8, 192, 192), 1)]
OF_SHIFTED = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", list(OF_SHIFTED), ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHIFTED)
def test_a_shift_inside_group_norm_is_the_sums_norm(seed, shape, groups, dtype):
    for last in (True, False):
        both = [[a.to("cuda", dtype) for a in each] for each in drawn(seed, shape, last)]
        (y, ty), right = expected(*([a.double() for a in each] for each in both), groups=groups, act="silu")
        given = [a.requires_grad_() for a in (*both[0], *both[1])]
        (x, shift, w, b), (tx, tshift, tw, tb) = given[:4], given[4:]
        own = {"shift": shift, "tshift": tshift, "eps": EPS, "act": "silu", "implementation": "triton"}
        found: Any = group_norm_dual(x, groups, w, b, tx, tw, tb, **own)
        gradients = torch.autograd.grad(found, given, tuple(both[2]))
        assert relative_error(found[0], y) < OF_SHIFTED[dtype]
        assert relative_error(found[1], ty) < OF_SHIFTED[dtype]
        assert all(relative_error(a, e) < 2 * OF_SHIFTED[dtype] for a, e in zip(gradients, right, strict=True))

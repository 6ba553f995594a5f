"""The gradients of attention and of its derivative on a GPU, every kernel: `python -m pytest tests/gpu`."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fullstride.jvp import attention
from fullstride.jvp.attention import naive, naive_varlen
from fullstride.jvp.attention.backward import backward, backward_varlen
from fullstride.jvp.attention.backward_table import BackwardConfig
from fullstride.jvp.attention.launch_forward import forward
from tests.jvp.attention.math_form import Case, draw, expected_backward, transposed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned(seed):
    """Fill the memory that the allocator hands out next with NaN, so that a row that is not written shows."""
    block = torch.full((1 << 26,), torch.nan, device=CUDA)
    del block


def close(found, expected, eps=None):
    """Products and weights are rounded to the dtype: 2 eps of half precision, 16 of fp32 for its sums."""
    assert (found is None) == (expected is None)
    if found is not None:
        roundings = 16 if found.dtype == torch.float32 else 2
        allowed = roundings * (eps or torch.finfo(found.dtype).eps)
        size = expected.norm()
        if size < 1e-6 * expected.numel() ** 0.5:  # with a single key all terms cancel, sums of 64 products each
            size = 8.0 * expected.numel() ** 0.5
        assert (found.double() - expected).norm() <= allowed * max(size, 8.0)


def with_outputs(case: Case, run: Any = naive.forward) -> tuple[Any, Any, Any]:
    """Return the outputs of `naive`, and random gradients of them."""
    saved: Any = run(*case.inputs, **case.options)
    go, gto = torch.randn(2, *saved[0].shape, device=CUDA, dtype=torch.float64).to(saved[0].dtype)
    return go, gto, saved


def check(
    case: Case, detached: bool = False, eps: float | None = None, run: Any = naive.forward, **kwargs: Any
) -> None:
    go, gto, saved = with_outputs(case, run)
    gto = None if detached else gto
    found = backward(go, gto, *case.inputs, *saved, **case.options, **kwargs)
    expected = expected_backward(case.to(torch.float64), go.double(), None if gto is None else gto.double())
    for x, f, e in zip(case.inputs, found, expected, strict=True):
        close(f, e, eps)
        assert f is None or f.stride() == x.stride()


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 96, 128, 144, 160, 192, 256])
def test_head_dims(dim, dtype, detached, seed):
    layout = transposed if dim % 3 == 0 else torch.clone
    check(draw(seed, 2, 4, 2, 197, 259, dim, layout=layout).to(CUDA, dtype), detached)


@pytest.mark.parametrize("length", [1, 128, 384])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_with_and_without_a_rest(length, dtype, seed):
    check(draw(seed, 1, 2, 2, length, 256, 64, 128).to(CUDA, dtype))


def far_from_zero(case: Case, score: float) -> Case:
    """Add about `score` to all scores of the case, by a column that no tangent moves."""
    q, k, tq, tk = (x.clone() for x in (case.q, case.k, case.tq, case.tk))
    q[..., 0], k[..., 0], tq[..., 0], tk[..., 0] = 4.0, score / (4.0 * case.scale), 0.0, 0.0
    return replace(case, q=q, k=k, tq=tq, tk=tk)


def close_far_from_zero(case: Case, score: float, found, expected, eps: float) -> None:
    """A score is a sum of 64, rounded in fp32 as often, and its weight is off by as much: 8 / 2 eps of the score.

    The gradients of a query sum to nothing in the added column: what is left are the roundings of terms that hold a
    key's large entry each.
    """
    eps += abs(score) / 4 * torch.finfo(torch.float32).eps  # `close` allows 16 of it
    reach = max(1.0, abs(case.k[0, 0, 0, 0].item()))
    for f, e, largest in zip(found, expected, (reach, 4.0, 1.0) * 2, strict=False):
        assert (f is None) == (e is None)
        if f is not None:
            close(f[..., 1:], e[..., 1:], eps)
            close(f[..., :1], e[..., :1], largest * eps)


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", [-1800.0, -150.0, 1800.0])
@pytest.mark.parametrize("length", [64, 192, 576])
def test_scores_far_from_zero(length, score, dtype, detached, seed):
    """If all of a row is below -88, exp(0 - lse) past the last key would be infinite."""
    case = far_from_zero(draw(seed, 2, 2, 2, length, length, 64), score).to(CUDA, dtype)
    go, gto, saved = with_outputs(case)
    gto = None if detached else gto
    found = backward(go, gto, *case.inputs, *saved, **case.options)
    expected = expected_backward(case.to(torch.float64), go.double(), None if gto is None else gto.double())
    close_far_from_zero(case, score, found, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", [-150.0, 0.0])
@pytest.mark.parametrize("length", [64, 128, 192, 576])
def test_gradients_without_a_tangent_where_cudnns_last_tile_is_half_empty(length, score, masked, compiled, seed):
    case = far_from_zero(draw(seed, 2, 2, 2, length, length, 64), score).to(CUDA, torch.bfloat16)
    mask = torch.ones(length, length, dtype=torch.bool, device=CUDA) if masked else None
    run = torch.compile(attention, fullgraph=True) if compiled else attention
    given = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    out = run(*given, scale=case.scale, attn_mask=mask)
    go = torch.randn_like(out)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = (exact[0] @ exact[1].mT * case.scale).softmax(-1) @ exact[2]
    wanted = torch.autograd.grad(expected, exact, go.double())
    close_far_from_zero(case, score, torch.autograd.grad(out, given, go), wanted, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_precisions_of_fp32(precision, seed):
    check(draw(seed, 1, 2, 2, 130, 77, 64, 32).to(CUDA, torch.float32), precision=precision)


def test_tf32_is_off_by_what_its_operands_lose(seed):
    """The tensor cores cut operands off at 10 bits: 4 x 2^-10, for two of them, twice in a row.

    The logsumexp is of scores that are cut off, too, as it is where attention is called: an exact one beside them
    leaves the weights' sum off, which by itself is half as much again.
    """
    case = draw(seed, 1, 2, 2, 130, 77, 64, 32).to(CUDA, torch.float32)
    check(case, eps=2**-12, run=partial(forward, precision="tf32"), precision="tf32")


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, (70, 33)), (True, (100, -1)), (False, (-1, 5)), (False, (0, 0))]
)
def test_bands(causal, window, dtype, detached, seed):
    check(draw(seed, 1, 2, 1, 333, 301, 64, causal=causal, window=window).to(CUDA, dtype), detached)


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("mask", ["bool", "heads", "additive"])
def test_masks_and_rows_that_see_nothing(mask, dim, dtype, detached, seed):
    case = draw(seed, 2, 2, 1, 150, 143, dim, 64, mask=mask).to(CUDA, dtype)
    if mask == "additive":
        case = replace(case, mask=case.mask.float())  # of its own precision, as masks are
    check(case, detached)


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_absent_tangents_have_no_gradient(present, dtype, seed):
    absent = " ".join(name for name, there in zip(("tq", "tk", "tv"), present, strict=True) if not there)
    check(draw(seed, 1, 2, 1, 200, 237, 64, absent=absent).to(CUDA, dtype))


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(dtype, detached, seed):
    lengths_q, lengths_k = (133, 0, 1, 240), (120, 7, 150, 0)
    case = draw(seed, 1, 4, 2, sum(lengths_q), sum(lengths_k), 72, 64).to(CUDA, dtype)
    inputs: Any = [x[0].transpose(0, 1) for x in case.inputs]
    cu: Any = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=CUDA) for n in (lengths_q, lengths_k)
    ]
    arguments: Any = *(x.double() for x in inputs), *cu
    saved: Any = naive_varlen.forward_varlen(*arguments, scale=0.2, causal=True)
    go, gto = torch.randn(2, *saved[0].shape, device=CUDA, dtype=torch.float64).to(dtype)
    tangent = None if detached else gto.double()
    arguments = go.double(), tangent, *arguments[:6], *saved, *cu
    expected = naive_varlen.backward_varlen(*arguments, scale=0.2, causal=True)
    rounded = [saved[0].to(dtype), saved[1].to(dtype), saved[2].float(), saved[3].float()]
    arguments = go, None if detached else gto, *inputs, *rounded, *cu
    found = backward_varlen(*arguments, max_seqlen_q=240, max_seqlen_k=150, scale=0.2, causal=True)
    for f, e in zip(found, expected, strict=True):
        close(f, e)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "names",
    [("dq dtq", "dk dtk dv dtv"), ("dq", "dtq", "dk dtk", "dv dtv"), ("dq dtq", "dk", "dtk dtv", "dv")],
    ids=str,
)
def test_configurations_agree(names, tma, seed):
    case = draw(seed, 1, 2, 2, 300, 290, 64).to(CUDA, torch.bfloat16)
    check(case, config=tuple(BackwardConfig(of, 64, 64, 4, 2, tma) for of in names))
    if not tma:
        check(case, config=tuple(BackwardConfig(of, 64, 64, 4, 1, parts=32) for of in names))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_same_in_every_run(dtype, seed):
    case = draw(seed, 2, 8, 2, 517, 400, 64, causal=True).to(CUDA, dtype)
    go, gto, saved = with_outputs(case)
    one: Any = backward(go, gto, *case.inputs, *saved, **case.options)
    for _ in range(3):
        other: Any = backward(go, gto, *case.inputs, *saved, **case.options)
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_together(dtype, seed):
    """Half precision's rounding of o and to enters their row sums: hence the wider bound."""
    case = draw(seed, 2, 4, 2, 197, 259, 64).to(CUDA, dtype)
    saved: Any = forward(*case.inputs, **case.options)
    go, gto = torch.randn(2, *saved[0].shape, device=CUDA, dtype=torch.float64).to(dtype)
    found = backward(go, gto, *case.inputs, *saved, **case.options)
    for f, e in zip(found, expected_backward(case.to(torch.float64), go.double(), gto.double()), strict=True):
        close(f, e, 2 * torch.finfo(dtype).eps)


def test_a_captured_graph_follows_its_inputs(seed):
    case = draw(seed, 1, 2, 2, 256, 256, 64).to(CUDA, torch.bfloat16)
    go, gto, saved = with_outputs(case)
    backward(go, gto, *case.inputs, *saved, **case.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found: Any = backward(go, gto, *case.inputs, *saved, **case.options)
    go.copy_(torch.randn_like(go))
    gto.copy_(torch.randn_like(gto))
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    for f, e in zip(found, expected_backward(case.to(torch.float64), go.double(), gto.double()), strict=True):
        close(f, e)


def test_rows_beyond_32_bit_offsets(seed):
    """A head's rows lie 2^31 elements apart and more, as one of many packed in a large tensor."""
    heads = 1 << 18
    case = draw(seed, 1, 1, 1, 140, 140, 64).to(CUDA, torch.bfloat16)
    big = torch.zeros(1, 140, heads, 64, dtype=torch.bfloat16, device=CUDA)
    for place, x in enumerate(case.inputs):
        big[:, :, heads - 6 + place] = x[:, 0]
    views = [big[:, :, heads - 6 + n : heads - 5 + n].transpose(1, 2) for n in range(6)]
    assert views[0].stride(2) * 139 >= 2**31
    go, gto, saved = with_outputs(case)
    arguments: Any = go, gto, *views, *saved
    found = backward(*arguments, **case.options)
    for f, e in zip(found, expected_backward(case.to(torch.float64), go.double(), gto.double()), strict=True):
        close(f, e)

"""The fused forward of attention and its derivative on a GPU, every kernel: `python -m pytest tests/gpu`."""

import itertools
from typing import Any

import pytest
import torch

from fullstride.jvp import attention_dual
from fullstride.jvp.attention import launch_forward as forward_module
from fullstride.jvp.attention.forward_table import ForwardConfig, SpecialisedConfig
from fullstride.jvp.attention.launch_forward import forward, forward_varlen
from tests.jvp.attention.closed_form import assert_close, dual_attention, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def poisoned(seed):
    """Fill the memory that the allocator hands out next with NaN, so that a row that is not written shows."""
    torch.manual_seed(seed)
    block = torch.full((1 << 26,), torch.nan, device=CUDA)
    del block


def run(inputs, **kwargs) -> Any:
    return forward(*inputs, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 96, 128, 144, 160, 192, 256])
def test_head_dims(dim, dtype):
    inputs = make_inputs((2, 4, 2, 197, 259, dim, dim), dtype, CUDA, packed=dim % 3 == 0)
    assert_close(run(inputs, scale=dim**-0.5), dual_attention(inputs, dim**-0.5), dtype)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_fp32_products_are_exact(precision):
    inputs = make_inputs((1, 2, 2, 130, 77, 64, 32), torch.float32, CUDA)
    found = run(inputs, scale=0.125, precision=precision)
    assert_close(found, dual_attention(inputs, 0.125), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, (70, 33)), (True, (100, -1)), (False, (-1, 5)), (False, (0, 0))]
)
def test_bands(causal, window, dtype):
    inputs = make_inputs((1, 2, 1, 333, 301, 64, 64), dtype, CUDA)
    found = run(inputs, scale=0.125, causal=causal, window=window)
    assert_close(found, dual_attention(inputs, 0.125, causal=causal, window=window), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_masks_and_rows_that_see_nothing(added, dtype):
    inputs = make_inputs((2, 2, 2, 150, 143, 80, 64), dtype, CUDA)
    mask = torch.rand(2, 1, 150, 143, device=CUDA) < 0.6
    mask[:, :, 5] = False
    mask = torch.randn(2, 1, 150, 143, device=CUDA).masked_fill(~mask, -torch.inf) if added else mask
    mask = mask.expand(2, 2, 150, 143)
    found = run(inputs, scale=0.1, mask=mask)
    assert_close(found, dual_attention(inputs, 0.1, mask=mask), dtype)
    assert not found[1][:, :, 5].any()


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3)), ids=str)
def test_absent_tangents_are_zero(present):
    q, k, v, *tangents = make_inputs((1, 2, 1, 200, 237, 64, 64), torch.bfloat16, CUDA)
    inputs = (q, k, v, *(t if p else None for t, p in zip(tangents, present, strict=True)))
    assert_close(run(inputs, scale=0.125), dual_attention(inputs, 0.125), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(dtype):
    lengths_q, lengths_k = (133, 0, 1, 240), (120, 7, 150, 0)
    inputs = make_inputs((1, 4, 2, sum(lengths_q), sum(lengths_k), 72, 64), dtype, CUDA)
    inputs = [x[0].transpose(0, 1) for x in inputs]
    cu = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    arguments: Any = (*inputs, cu[0].cuda(), cu[1].cuda(), 240, 150)
    found: Any = forward_varlen(*arguments, scale=0.2, causal=True)
    for n in range(4):
        a, b = slice(cu[0][n], cu[0][n + 1]), slice(cu[1][n], cu[1][n + 1])
        one = [x[s].transpose(0, 1)[None] for x, s in zip(inputs, (a, b, b) * 2, strict=True)]
        part = [x[a].transpose(0, 1)[None] for x in found[:2]] + [x[:, a][None] for x in found[2:]]
        assert_close(part, dual_attention(one, 0.2, causal=True), dtype)


@hopper
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("dim", "block_n"), [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("lengths", [(256, 256), (1, 1), (333, 517), (65, 40), (1000, 128)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_warp_specialised_kernel(dtype, causal, lengths, dim, block_n, turns):
    inputs = make_inputs((2, 4, 2, *lengths, dim, dim), dtype, CUDA, packed=lengths[0] == 333)
    found = run(inputs, scale=dim**-0.5, causal=causal, config=SpecialisedConfig(block_n, 2, turns))
    assert_close(found, dual_attention(inputs, dim**-0.5, causal=causal), dtype)


@hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_takes_the_warp_specialised_kernel(dim, causal, monkeypatch):
    ran, run_it = [], forward_module.run_specialised
    monkeypatch.setattr(forward_module, "run_specialised", lambda *args: ran.append(run_it(*args)))
    inputs = make_inputs((2, 4, 4, 333, 333, dim, dim), torch.bfloat16, CUDA, packed=True)
    found: Any = attention_dual(inputs[0], inputs[1], inputs[2], *inputs[3:], is_causal=causal)
    assert len(ran) == 1
    for x, y in zip(found, dual_attention(inputs, dim**-0.5, causal=causal), strict=False):
        assert (x.cpu().double() - y).norm() <= 2 * torch.finfo(torch.bfloat16).eps * y.norm()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_configurations_agree(dtype):
    inputs = make_inputs((1, 2, 2, 300, 290, 64, 64), dtype, CUDA)
    expected = dual_attention(inputs, 0.125)
    for tma, early, block_m in itertools.product([True, False], [True, False], [64, 128]):
        config = ForwardConfig(block_m, 64, block_m // 16, 2, early=early, tma=tma)
        assert_close(run(inputs, scale=0.125, config=config), expected, dtype)


@pytest.mark.parametrize("length", [256, 2048])
def test_a_captured_graph_follows_its_inputs(length):
    inputs = make_inputs((1, 2, 2, length, length, 64, 64), torch.bfloat16, CUDA)
    run(inputs, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs, scale=0.125)
    for x in inputs:
        x.copy_(torch.randn_like(x))
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    assert_close(found, dual_attention(inputs, 0.125), torch.bfloat16)


def test_rows_beyond_32_bit_offsets():
    """A head's rows lie 2^31 elements apart and more, as one of many packed in a large tensor."""
    heads = 1 << 18
    big = torch.zeros(1, 140, heads, 64, dtype=torch.bfloat16, device=CUDA)
    inputs = make_inputs((1, 1, 1, 140, 140, 64, 64), torch.bfloat16, CUDA)
    for place, x in enumerate(inputs):
        big[:, :, heads - 6 + place] = x[:, 0]
    views = [big[:, :, heads - 6 + n : heads - 5 + n].transpose(1, 2) for n in range(6)]
    assert views[0].stride(2) * 139 >= 2**31
    assert_close(run(views, scale=0.125), dual_attention(inputs, 0.125), torch.bfloat16)

"""The fused forward through Triton's interpreter, against fp64. bf16 products are wrong there: see tests/gpu."""

import itertools
from typing import Any

import pytest
import torch

from fullstride.jvp.attention import launch_common as launching
from fullstride.jvp.attention import launch_forward as forward_module
from fullstride.jvp.attention.forward_table import ForwardConfig, SpecialisedConfig, pick
from fullstride.jvp.attention.launch_common import fits_tma, takes_specialised
from fullstride.jvp.attention.launch_forward import forward, forward_varlen
from fullstride.jvp.attention.tiles import pieces
from tests.jvp.attention.closed_form import assert_close, dual_attention, make_inputs

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu"),
    # The interpreter's own loops over a runtime range.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SMALL = ForwardConfig(32, 16, 4, 2)
DIMS = (16, 72, 96, 112, 130, 256)
TMA = ForwardConfig(32, 16, 4, 2, tma=True)
LATE = ForwardConfig(16, 32, 4, 2, early=False)


def poisoning(empty):
    def filled(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    return filled


@pytest.fixture(autouse=True)
def poisoned(monkeypatch, seed):
    """Fill outputs with NaN first, so that unwritten elements show; inputs are new for each seed."""
    torch.manual_seed(seed)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def run(inputs, **kwargs) -> Any:
    return forward(*inputs, **kwargs)


@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    [
        ((2, 1, 1, 33, 47, 32, 32), torch.float32, SMALL),
        ((1, 4, 2, 18, 17, 72, 16), torch.float32, LATE),
        ((1, 2, 1, 1, 65, 96, 80), torch.float32, SMALL),
        ((1, 1, 1, 35, 1, 16, 24), torch.float32, SMALL),
        ((1, 3, 1, 40, 49, 64, 64), torch.float16, TMA),
        ((1, 1, 1, 34, 33, 80, 80), torch.float16, LATE),
    ],
    ids=str,
)
def test_forward_and_derivative(shape, dtype, config):
    inputs = make_inputs(shape, dtype, packed=shape[0] == 1)
    scale = 1.3 * shape[5] ** -0.5
    found = run(inputs, scale=scale, config=config)
    assert_close(found, dual_attention(inputs, scale), dtype)


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, (9, 4)), (True, (20, -1)), (False, (-1, 3)), (False, (0, 0)), (False, (25, -1))],
)
def test_bands(causal, window, seed):
    lengths = (70, 51) if seed else (33, 90)
    inputs = make_inputs((1, 1, 1, *lengths, 16, 16), torch.float32)
    found = run(inputs, scale=0.3, causal=causal, window=window, config=SMALL)
    assert_close(found, dual_attention(inputs, 0.3, causal=causal, window=window), torch.float32)


@pytest.mark.parametrize("kind", ["bool", "added", "broadcast", "lowest"])
def test_masks_and_rows_that_see_nothing(kind):
    inputs = make_inputs((2, 2, 2, 37, 43, 16, 32), torch.float32)
    mask = torch.rand(2, 2, 37, 43) < 0.6
    mask[:, :, 5] = False
    if kind == "added":
        mask = torch.randn(2, 2, 37, 43).masked_fill(~mask, -torch.inf)
    elif kind == "broadcast":
        mask = mask[:, :1, :1].expand(2, 2, 37, 43)
    elif kind == "lowest":
        mask = torch.zeros(2, 2, 37, 43).masked_fill(~(mask | ~mask.any(-1, keepdim=True)), torch.finfo().min)
    found = run(inputs, scale=0.25, mask=mask, causal=kind == "bool", config=SMALL)
    assert_close(found, dual_attention(inputs, 0.25, mask=mask, causal=kind == "bool"), torch.float32)
    if kind in ("bool", "added"):
        assert found[0][:, :, 5].eq(0).all()
        assert found[1][:, :, 5].eq(0).all()
        assert found[2][:, :, 5].eq(-torch.inf).all()


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3)), ids=str)
def test_absent_tangents_are_zero(present):
    q, k, v, *tangents = make_inputs((1, 2, 1, 20, 37, 16, 16), torch.float32)
    tangents = [t if p else None for t, p in zip(tangents, present, strict=True)]
    o, to, lse, mu = run((q, k, v, *tangents), scale=0.25, causal=True, config=SMALL)
    assert (to is None) == (mu is None) == (not any(present))
    assert_close((o, to, lse, mu), dual_attention((q, k, v, *tangents), 0.25, causal=True), torch.float32)


def test_the_derivative_is_linear_in_tangents_of_any_size():
    q, k, v, *tangents = make_inputs((1, 1, 1, 30, 41, 32, 32), torch.float32)
    one = run((q, k, v, *tangents), scale=0.2, config=SMALL)
    many = run((q, k, v, *(t * 2**20 for t in tangents)), scale=0.2, config=SMALL)
    torch.testing.assert_close(many[1], one[1] * 2**20, rtol=0, atol=0)
    torch.testing.assert_close(many[3], one[3] * 2**20, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 40.0])
def test_scales(scale):
    inputs = make_inputs((1, 1, 1, 20, 37, 16, 16), torch.float32)
    expected = dual_attention(inputs, scale)
    assert_close(run(inputs, scale=scale, config=SMALL), expected, torch.float32, values=max(1.0, 64 * scale))


def test_strides_of_any_order():
    """Heads of a U-Net: columns far apart, tangents laid out otherwise than their primals."""
    inputs = make_inputs((1, 2, 2, 36, 36, 24, 24), torch.float32)
    turned = [x.mT.contiguous().mT for x in inputs[:4]] + [inputs[4], inputs[5].expand(3, 2, 36, 24)[1:2]]
    found = run(turned, scale=0.2, config=TMA)
    assert_close(found, dual_attention(inputs, 0.2), torch.float32)


def test_layout_of_the_outputs_follows_q():
    q, *rest = make_inputs((2, 3, 3, 20, 20, 16, 32), torch.float32, packed=True)
    assert run((q, *rest), scale=1.0, config=SMALL)[0].transpose(1, 2).is_contiguous()
    assert run((q.contiguous(), *rest), scale=1.0, config=SMALL)[1].is_contiguous()


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (5, 9))])
def test_packed_sequences(causal, window):
    lengths_q, lengths_k = (33, 0, 1, 40), (20, 7, 50, 0)
    q, k, v, tq, tk, tv = (
        x[0].transpose(0, 1) for x in make_inputs((1, 4, 2, sum(lengths_q), sum(lengths_k), 24, 16), torch.float32)
    )
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    packed: Any = (q, k, v, tq, tk, tv, cu_q, cu_k, 40, 50)
    found: Any = forward_varlen(*packed, scale=0.2, causal=causal, window=window, config=TMA)
    for n in range(4):
        a, b = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        one = [x[s].transpose(0, 1)[None] for x, s in zip((q, k, v, tq, tk, tv), (a, b, b) * 2, strict=True)]
        expected = dual_attention(one, 0.2, causal=causal, window=window)
        part = [x[a].transpose(0, 1)[None] for x in found[:2]] + [x[:, a][None] for x in found[2:]]
        assert_close(part, expected, torch.float32)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_table_has_a_configuration_for_all(capability, dtype):
    truths = (True, False)
    precisions = "ieee", "tf32x3"
    for dim, keys, precision, tma, masked in itertools.product(DIMS, (1, 4096), precisions, truths, truths):
        config = pick(dtype, dim, 64, keys, capability, precision, tma, masked)
        assert config.tma <= (tma and capability[0] == 9)
        assert config.block_n <= (32 if masked else 128)
        # Fewer rows a warp of wgmma, and Triton 3.6 has two groups of warps share a head's tail of columns: wrong.
        wgmma = capability[0] == 9 and config.block_m >= 64
        assert not (wgmma and pieces(dim)[2]) or config.block_m >= 16 * config.warps


def test_a_kernel_that_was_named_runs_or_raises():
    inputs = make_inputs((1, 1, 1, 64, 64, 64, 64), torch.float16)
    with pytest.raises(ValueError, match="expected a Hopper GPU"):
        run(inputs, scale=1.0, config=SpecialisedConfig(64, 2))


def test_nothing_to_do():
    for lengths in [(0, 5), (5, 0)]:
        inputs = make_inputs((2, 1, 1, *lengths, 16, 16), torch.float32)
        o, to, lse, mu = run(inputs, scale=1.0)
        assert o.shape == (2, 1, lengths[0], 16)
        assert not o.any()
        assert not to.any()
        assert not mu.any()
        assert lse.eq(-torch.inf).all()


def test_one_launch_and_no_other_operation(monkeypatch):
    """A captured graph must not copy inputs or read sizes back."""
    inputs = make_inputs((1, 2, 2, 8, 8, 16, 16), torch.float32)
    calls = []
    monkeypatch.setattr(forward_module, "dual_forward", {(2,): lambda *a, **k: calls.append((a, k))})
    run(inputs, scale=1.0, mask=torch.ones(1, 2, 8, 8, dtype=torch.bool), config=SMALL)
    assert len(calls) == 1
    assert [x.data_ptr() for x in calls[0][0][:6]] == [x.data_ptr() for x in inputs]


@pytest.mark.parametrize(("dim", "columns"), [(16, 16), (24, 32), (72, 80), (80, 80), (96, 96), (112, 128), (160, 160)])
def test_head_dims_are_cut_into_two_pieces(dim, columns):
    assert pieces(dim)[0] == dim
    assert sum(pieces(dim)[1:]) == columns


def test_what_the_tensor_memory_accelerator_takes():
    x = torch.zeros(2, 3, 8, 64, dtype=torch.float16)
    assert fits_tma(x)
    assert fits_tma(x.transpose(1, 2))
    assert not fits_tma(x.mT)
    assert not fits_tma(x[..., 1:])
    assert not fits_tma(x[:1].expand(4, 3, 8, 64))
    assert not fits_tma(x[:0])


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True  # pyright: ignore[reportIncompatibleVariableOverride,reportAssignmentType]


@pytest.mark.parametrize(
    ("window", "taken"), [(None, True), ((-1, -1), True), ((-1, 0), False), ((7, -1), False)], ids=str
)
def test_a_window_without_limits_is_none_to_the_warp_specialised_kernel(window, taken, monkeypatch):
    monkeypatch.setattr(launching, "capability", lambda _: (9, 0))
    inputs = [torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16).as_subclass(OnGpu) for _ in range(6)]
    assert takes_specialised(inputs, None, window, 0.125) == taken


def test_rows_behind_the_last_sequence_are_zeros():
    q, k, v, tq = torch.randn(4, 9, 2, 16)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    o, to, *_ = forward_varlen(q, k, v, tq, None, None, starts, starts, 3, 3, scale=0.2, config=SMALL)
    assert o[:5].all()
    assert not o[5:].any()
    assert to is not None
    assert to[:5].all()
    assert not to[5:].any()

"""Repeated calls of the fused ops on a GPU: the bits of a call that is planned anew, for any tensors of one kind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fullstride.jvp.attention.register import ATTENTION, VARLEN
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Make = Any
SCORES = (0.125, False, -1, -1, "")


def rows(*shape: int) -> Make:
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype)


def images(*shape: int) -> Make:
    return lambda device, dtype: rows(*shape)(device, dtype).contiguous(memory_format=torch.channels_last)


def head(*shape: int) -> Make:
    """One of q, k, v as the part of a projection that models cut them from."""
    b, h, length, d = shape
    return lambda device, dtype: rows(b, length, 3, h, d)(device, dtype).permute(2, 0, 3, 1, 4)[1]


def triangle(length: int) -> Make:
    return lambda device, dtype: torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def starts(*numbers: int) -> Make:
    return lambda device, dtype: torch.tensor(numbers, dtype=torch.int32, device=device)


ABSENT: Make = lambda device, dtype: None  # noqa: E731
WIDE, LONG, PACKED = rows(2, 3, 256, 64), head(4, 3, 197, 64), rows(96, 2, 64)
SMALL, LARGE, SCALE = rows(2, 64, 8, 8), images(2, 64, 96, 96), rows(64)
TOKENS, WIDTH, SAMPLES, SHIFT = rows(4, 197, 768), rows(768), rows(4, 64, 96), rows(4, 96)
# The op, its primals, tangents and settings.
CASES: dict[str, tuple[DualOp, list[Make], list[Make], tuple[Any, ...]]] = {
    "group norm": (GROUP_NORM, [SMALL, SCALE, SCALE], [SMALL, SCALE, SCALE], (8, 1e-5, "silu", None)),
    "group norm, large": (GROUP_NORM, [LARGE, SCALE, SCALE], [LARGE, ABSENT, ABSENT], (8, 1e-5, "", None)),
    "layer norm": (LAYER_NORM, [TOKENS, WIDTH, WIDTH], [TOKENS, ABSENT, ABSENT], (1e-5, None)),
    "rms norm": (RMS_NORM, [rows(33, 129), rows(129)], [rows(33, 129), rows(129)], (1e-5, None)),
    "ada layer norm": (ADA_LAYER_NORM, [SAMPLES, SHIFT, SHIFT], [SAMPLES, SHIFT, SHIFT], (1e-6, None)),
    "attention": (ATTENTION, [WIDE, WIDE, WIDE, ABSENT], [WIDE, WIDE, WIDE], SCORES),
    "attention of parts": (ATTENTION, [LONG, LONG, LONG, ABSENT], [LONG, LONG, LONG], SCORES),
    "attention, causal": (ATTENTION, [WIDE, WIDE, WIDE, ABSENT], [WIDE, ABSENT, WIDE], (0.125, True, -1, -1, "")),
    "attention, masked": (ATTENTION, [WIDE, WIDE, WIDE, triangle(256)], [WIDE, WIDE, WIDE], SCORES),
    "packed": (VARLEN, [PACKED, PACKED, PACKED, starts(0, 31, 96), starts(0, 31, 96)], [PACKED] * 3, (65, 65, *SCORES)),
}  # fmt: skip
PLANNED = {"attention, masked"}  # a mask is read as bytes, which are a view


def drawn(name: str, device: str, dtype: torch.dtype) -> list[Any]:
    _, primals, tangents, _ = CASES[name]
    tensors = [make(device, dtype) for make in (*primals, *tangents)]
    if name == "attention, masked":
        tensors[3] = tensors[3].expand(2, 3, 256, 256)
    return tensors


def same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def both(name: str, device: str, dtype: torch.dtype, detached: bool) -> list[Tensor]:
    """Results of forward and backward, the same bits as those of calls that are planned anew."""
    op, *_, settings = CASES[name]
    tensors, settings = drawn(name, device, dtype), (*settings, "triton")
    outs = op.run(*tensors, *settings)
    same_bits(outs, op._forward(*tensors, *settings))
    gradient, of_tangent = (torch.randn_like(x) for x in outs[:2] if x is not None)
    kept = outs if op.keeps_output else [None, None, *outs[2:]]
    given = gradient, None if detached else of_tangent, *tensors, *kept, *settings, False
    found = op.gradients(*given)
    same_bits(found, op._gradients(*given))
    return [x for x in (*outs, *found) if x is not None]


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_has_the_bits_of_a_planned_one(name, dtype, detached, monkeypatch):
    torch.manual_seed(0)
    op, *_ = CASES[name]
    for replayed in (op._replayed_forward, op._replayed_backward):
        monkeypatch.setattr(replayed, "_kinds", {})
    made = [both(name, "cuda", dtype, detached) for _ in range(4)]
    addresses = [x.data_ptr() for call in made for x in call]
    assert len({*addresses}) == len(addresses)
    for replayed in (op._replayed_forward, op._replayed_backward):
        assert [not isinstance(kind, bool) for kind in replayed._kinds.values()] == [name not in PLANNED]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["group norm", "layer norm", "attention"])
def test_ops_run_on_the_gpu_of_their_tensors(name):
    torch.manual_seed(0)
    torch.cuda.set_device(0)  # JAX's tests leave another one
    op, *_, settings = CASES[name]
    for _ in range(4):
        tensors = drawn(name, "cuda:1", torch.float32)
        found = op.run(*tensors, *settings, "triton")
        torch.cuda.synchronize(1)
        expected = op.run(*(None if x is None else x.to("cuda:0") for x in tensors), *settings, "triton")
        assert torch.cuda.current_device() == 0
        same_bits([None if x is None else x.cpu() for x in found], [None if x is None else x.cpu() for x in expected])
        assert {x.device.index for x in found if x is not None} == {1}

"""A batch of which some samples carry a tangent, on a GPU: `python -m pytest tests/gpu/test_partial.py`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp import group_norm, partial_jvp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# (B, C, *pixels), groups, samples that move: whole groups on the chip, padded ones, and groups that no chip holds.
SIZES = [((8, 128, 32, 32), 32, 2), ((5, 6, 5, 7), 3, 4), ((4, 64, 16, 16), 16, 1), ((3, 8, 192, 192), 1, 2)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference(x: Tensor, v: Tensor, w: Tensor, groups: int) -> list[Tensor]:
    f = lambda x: F.silu(F.group_norm(x, groups, w))  # noqa: E731
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    out = f(x)
    moved = torch.func.jvp(f, (x[: len(v)].detach(),), (v.double(),))[1]
    return [out, moved.detach(), *torch.autograd.grad(out.sin().sum(), (x, w))]


def ours(x: Tensor, v: Tensor, w: Tensor, groups: int, compiled: bool) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    f = lambda x, v: partial_jvp(lambda x: group_norm(x, groups, w, act="silu"), (x,), (v,))  # noqa: E731
    out, moved = (torch.compile(f, fullgraph=True, dynamic=False) if compiled else f)(x, v)
    return [out, moved, *torch.autograd.grad(out.double().sin().sum(), (x, w))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "groups", "moving"), SIZES)
def test_group_norm_agrees_with_fp64(shape, groups, moving, dtype, last, compiled, seed):
    draw = torch.Generator("cuda").manual_seed(seed)
    x, v = (torch.randn(n, *shape[1:], generator=draw, device="cuda").to(dtype) for n in (shape[0], moving))
    w = 1 + torch.randn(shape[1], generator=draw, device="cuda") / 3
    layout = torch.channels_last if last else torch.contiguous_format
    x, v = x.contiguous(memory_format=layout), v.contiguous(memory_format=layout)
    torch._dynamo.reset()  # every case is one more program of the same function, of which eight are allowed
    found = ours(x, v, w, groups, compiled)
    for got, want in zip(found, reference(x, v, w, groups), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() < TOLERANCE[dtype] * want.norm()

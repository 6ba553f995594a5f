"""Comparisons of an op's derivatives, computed in every way, with its reference's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from fullstride.jvp import jvp

Call = Callable[..., Tensor]
Points = Sequence[Any]  # tensors; None for a tangent that is absent


def close(found: Any, expected: Any) -> None:
    """Compare to the rounding of fp64; all-zero results would fail."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert all(x.abs().max() > 1e-4 for x in pytree.tree_leaves(expected) if x.numel())


def with_zeros(primals: Points, tangents: Points) -> list[Tensor]:
    """Replace absent tangents by zeros."""
    return [torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)]


def torchs(op: Call, primals: Points, tangents: Points) -> tuple[Tensor, Tensor]:
    """Derive by torch.func.jvp; arguments without a tangent are constants."""
    moved = [i for i, t in enumerate(tangents) if t is not None]

    def of_those(*given: Tensor) -> Tensor:
        full = list(primals)
        for i, x in zip(moved, given, strict=True):
            full[i] = x
        return op(*full)

    out = torch.func.jvp(of_those, tuple(primals[i] for i in moved), tuple(tangents[i] for i in moved))
    return out[0], out[1]


def ours(op: Call, primals: Points, tangents: Points) -> tuple[Tensor, Tensor]:
    """Derive by fullstride.jvp, with a graph of the tangent."""
    out = jvp(op, tuple(primals), tuple(tangents), tangent_grad=True)
    return out[0], out[1]


def detached(op: Call, primals: Points, tangents: Points) -> tuple[Tensor, Tensor]:
    """Derive by fullstride.jvp, without a graph of the tangent."""
    out = jvp(op, tuple(primals), tuple(tangents))
    return out[0], out[1]


def dual_level(op: Call, primals: Points, tangents: Points) -> tuple[Tensor, Tensor]:
    """Derive by dual tensors."""
    with forward_ad.dual_level():
        duals = [p if t is None else forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        out = forward_ad.unpack_dual(op(*duals))
        assert out.tangent is not None
        return out.primal, out.tangent


WAYS = {"jvp": ours, "torch.func.jvp": torchs, "dual_level": dual_level, "detached": detached}


def gradients(
    op: Call, way: Callable, primals: Points, tangents: Points, weights: Points, through: bool
) -> list[Tensor]:
    """Gradients of a loss of the output and its tangent, by all primals and tangents that are given."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (*primals, *tangents)]
    o, to = way(op, leaves[: len(primals)], leaves[len(primals) :])
    loss = (o * weights[0]).sum() + ((to.sin() if through else to.detach()) * o * weights[1]).sum()
    asked = [x for x in (leaves if through else leaves[: len(primals)]) if x is not None]
    return list(torch.autograd.grad(loss, asked, allow_unused=not through, materialize_grads=not through))


def check_forward(op: Call, reference: Call, primals: Points, tangents: Points) -> None:
    """Output and tangent, by every way."""
    expected = torchs(reference, primals, tangents)
    for way in WAYS.values():
        close(way(op, primals, tangents), expected)


def check_backward(op: Call, reference: Call, primals: Points, tangents: Points, weights: Points) -> None:
    """Gradients through the output and its tangent, and past a tangent that is detached."""
    expected = gradients(reference, torchs, primals, tangents, weights, through=True)
    for way in (ours, torchs, dual_level):
        close(gradients(op, way, primals, tangents, weights, through=True), expected)
    expected = gradients(reference, torchs, primals, tangents, weights, through=False)
    for way in (detached, ours, torchs):
        close(gradients(op, way, primals, tangents, weights, through=False), expected)


def check_transforms(op: Call, reference: Call, primals: Points, many: Points, draws: int) -> None:
    """func.grad of jvp, vmap of jvp over all or the first tangent, vmap of grad of jvp; `many` are stacked tangents."""
    every = tuple(range(len(primals)))

    def slope(f: Call, way: Callable) -> Callable:
        def loss(*x: Tensor) -> Tensor:
            o, to = way(f, x, [t[0] for t in many])
            return (o * to.sin()).sum()

        return loss

    expected = grad(slope(reference, torchs), argnums=every)(*primals)
    for way in (ours, torchs):
        close(grad(slope(op, way), argnums=every)(*primals), expected)
    for way in (detached, ours, torchs):
        close(_mapped(op, way, primals, many), _mapped(reference, torchs, primals, many))
        close(_mapped_alone(op, way, primals, many[0]), _mapped_alone(reference, torchs, primals, many[0]))
    moved = [p + 0.1 * t for p, t in zip(primals, many, strict=True)]
    expected = vmap(grad(slope(reference, torchs), argnums=every))(*moved)
    assert expected[0].shape[0] == draws
    close(vmap(grad(slope(op, torchs), argnums=every))(*moved), expected)
    alone = lambda f: vmap(grad(f), in_dims=(0, *[None] * (len(primals) - 1)))(moved[0], *primals[1:])  # noqa: E731
    close(alone(slope(op, ours)), alone(slope(reference, torchs)))


def _mapped(op: Call, way: Callable, primals: Points, many: Points) -> Tensor:
    """All tangents mapped, over a dimension that is not the first."""
    mapped = vmap(lambda *t: way(op, primals, t)[1], in_dims=1, out_dims=1)
    return mapped(*(t.movedim(0, 1) for t in many))


def _mapped_alone(op: Call, way: Callable, primals: Points, many: Tensor) -> Tensor:
    absent = [None] * (len(primals) - 1)
    return vmap(lambda t: way(op, primals, [t, *absent])[1])(many)

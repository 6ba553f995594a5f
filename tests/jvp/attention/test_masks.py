"""Masks that require a gradient, carry a tangent, or are tensor subclasses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from fullstride.jvp import attention, attention_dual, jvp, layer_norm, layer_norm_dual
from tests.jvp.derivatives import close, ours, torchs

SHAPE = (2, 3, 5, 8)


class Named(Tensor):
    """Subclass that leaves every operation to its base."""


class NamedParameter(nn.Parameter):
    """A parameter with a name of its own."""


class Halved(Tensor):
    """A wrapper like those of quantised weights: its values are twice those in memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Halved":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, held: Tensor):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.alias.default:
            return cls(args[0].held)
        raise NotImplementedError(func)

    def dequantize(self) -> Tensor:
        return 2 * self.held


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("keys", [5, 9])
def test_a_causal_bias_is_the_triangle_that_it_stands_for(seed, bias, keys):
    torch.manual_seed(seed)
    q, k, tq = draw(*SHAPE), draw(2, 3, keys, 8), draw(*SHAPE)
    seen = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5 if bias is causal_lower_right else 0)
    added = torch.zeros(5, keys, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    expected = torchs(lambda q: written(q, k, k.sin(), added), [q], [tq])
    for way in (ours, torchs):
        close(way(lambda q: attention(q, k, k.sin(), attn_mask=bias(5, keys)), [q], [tq]), expected)
    close(attention_dual(q, k, k.sin(), tq, attn_mask=bias(5, keys)), expected)


def test_a_subclass_that_only_has_another_name_is_taken_and_gets_its_gradient(seed):
    torch.manual_seed(seed)
    x, tx, values = draw(4, 8), draw(4, 8), draw(8)
    plain, named = values.clone().requires_grad_(), values.clone().as_subclass(Named).requires_grad_()
    for weight in (plain, named, parameter := NamedParameter(values.clone())):
        out, tangent = jvp(lambda x, w=weight: layer_norm(x, w), (x,), (tx,), tangent_grad=True)
        (out * tangent).sum().backward()
    assert plain.grad is not None
    assert plain.grad.abs().min() > 0
    for weight in (named, parameter):
        assert weight.grad is not None
        close(weight.grad.as_subclass(Tensor), plain.grad)


def test_a_wrapper_that_can_be_unpacked_is(seed):
    torch.manual_seed(seed)
    x, tx, weight = draw(4, 8), draw(4, 8), draw(8)
    found = jvp(lambda x: layer_norm(x, Halved(weight)), (x,), (tx,))
    close(found, jvp(lambda x: layer_norm(x, 2 * weight), (x,), (tx,)))


@pytest.mark.filterwarnings("ignore:.*MaskedTensor:UserWarning")
def test_other_subclasses_are_refused_with_the_remedy(seed):
    torch.manual_seed(seed)
    q = draw(*SHAPE)

    class Doubled(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs)

    with pytest.raises(ValueError, match=r"attn_mask is a Doubled, expected a torch.Tensor: .*x.as_subclass"):
        jvp(lambda q: attention(q, q, q, attn_mask=draw(5, 5).as_subclass(Doubled)), (q,), (q,))
    with pytest.raises(ValueError, match="tweight is a Doubled"):
        layer_norm_dual(q, q[0, 0, 0], tweight=q[0, 0, 0].as_subclass(Doubled))
    with pytest.raises(ValueError, match=r"weight is a torch.sparse_coo tensor, expected a dense one: .*to_dense"):
        layer_norm_dual(q, q[0, 0, 0].to_sparse(), tx=q)
    mask = masked_tensor(draw(5, 5), torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"MaskedTensor.to_tensor\(\)"):
        jvp(lambda q: attention(q, q, q, attn_mask=mask), (q,), (q,))


def learned(op: Callable[..., Tensor], way: Callable, bias: Tensor, weight: Tensor, q: Tensor, tq: Tensor) -> Tensor:
    """Loss of a bias that is computed in the function: functorch wraps it there, and hides its `requires_grad`."""
    out, tangent = way(lambda q: op(q @ weight, q, q.sin(), bias * 1 + bias.mean()), [q], [tq])
    return (out * tangent.sin()).sum()


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, attn_mask=mask)


def detached(fn: Callable, primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, tangent = jvp(fn, tuple(primals), tuple(tangents))
    return out, tangent


def past(fn: Callable, primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, tangent = torchs(fn, primals, tangents)
    return out, tangent.detach()


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 1, 5, 5), (5,)])
@pytest.mark.parametrize(("way", "reference"), [(ours, torchs), (torchs, torchs), (detached, past)])
def test_a_bias_that_is_computed_in_the_function_has_its_gradient(seed, way, reference, shape):
    torch.manual_seed(seed)
    bias, weight, q, tq = draw(*shape).requires_grad_(), draw(8, 8).requires_grad_(), draw(*SHAPE), draw(*SHAPE)
    expected = torch.autograd.grad(learned(written, reference, bias, weight, q, tq), (bias, weight))
    close(torch.autograd.grad(learned(fused, way, bias, weight, q, tq), (bias, weight)), expected)
    by_transform = grad(lambda b, w: learned(fused, way, b, w, q, tq), argnums=(0, 1))
    close(by_transform(bias.detach(), weight.detach()), expected)


@pytest.mark.parametrize("options", [{}, {"window": (1, 2)}, {"scale": 0.3}])
def test_a_mask_that_moves_is_differentiated_with_the_rest(seed, options):
    torch.manual_seed(seed)
    x, tx, bias = draw(*SHAPE), draw(*SHAPE), draw(5, 5).requires_grad_()
    offset = torch.arange(5) - torch.arange(5)[:, None]
    hidden = (offset > 2) | ((offset < -1) | (offset > 2) if "window" in options else False)

    def moving(x: Tensor) -> Tensor:
        return (x.square().mean(-1)[..., None] + bias).masked_fill(hidden, -torch.inf)

    def reference(x: Tensor) -> Tensor:
        scores = x @ x.mT * options.get("scale", 8**-0.5)
        return (scores + moving(x)).softmax(-1) @ x

    for way in (ours, torchs):
        found = way(lambda x: attention(x, x, x, attn_mask=moving(x), **options), [x], [tx])
        expected = torchs(reference, [x], [tx])
        close(found, expected)
        losses = [(out * tangent.sin()).sum() for out, tangent in (found, expected)]
        close(*(torch.autograd.grad(loss, bias)[0] for loss in losses))


def test_what_a_moving_mask_hides_may_have_any_tangent(seed):
    torch.manual_seed(seed)
    q, tq, mask = draw(*SHAPE), draw(*SHAPE), draw(5, 5)
    mask[1, 2:], mask[3] = -torch.inf, -torch.inf
    tmask = draw(5, 5)
    fill = [0.0, -torch.inf, torch.nan]
    found = [jvp(lambda q, m: fused(q, q, q, m), (q, mask), (tq, tmask.where(mask > -torch.inf, x))) for x in fill]
    close(found[1], found[0])
    close(found[2], found[0])
    assert found[0][1][:, :, 3].abs().max() == 0

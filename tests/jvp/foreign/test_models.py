"""Models of other libraries, against an untouched copy under torch.func.jvp with torch's math attention.

The whole is `FULLSTRIDE_FOREIGN=1 python -m pytest tests/jvp/foreign`, with the extra `foreign` installed; without that
variable a small selection runs.
"""

import copy
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullstride.jvp import jvp, prepare
from tests.jvp import plain_ops
from tests.jvp.foreign.models import MODELS, random_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
NAMES = [name for name, model in MODELS.items() if model.quick or os.environ.get("FULLSTRIDE_FOREIGN")]
Loss = Callable[[Tensor, Tensor], Tensor]


def past(u: Tensor, du: Tensor) -> Tensor:
    """Loss of MeanFlow: the tangent is a constant."""
    return (u - du.detach()).square().mean()


def through(u: Tensor, du: Tensor) -> Tensor:
    """Loss with a gradient through the tangent."""
    return (u * du.sin()).mean()


@pytest.fixture
def written_norms(monkeypatch):
    """Replace norms by elementary operations, since torch's gradient through their tangents is wrong."""

    def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
        y = plain_ops.normalised(x, tuple(range(-len(normalized_shape), 0)), eps)
        return plain_ops.affine(y, weight, bias)

    def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
        grouped = x.unflatten(1, (num_groups, -1))
        y = plain_ops.normalised(grouped, tuple(range(2, grouped.ndim)), eps).flatten(1, 2)
        one = (-1, *[1] * (x.ndim - 2))
        return plain_ops.affine(y, *(None if p is None else p.view(one) for p in (weight, bias)))

    def instance_norm(x, *_, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
        return group_norm(x, x.shape[1], weight, bias, eps)

    def batch_norm(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        one = (-1, *[1] * (x.ndim - 2))
        y = (x - mean.view(one)) / (var.view(one) + eps).sqrt()
        return plain_ops.affine(y, *(None if p is None else p.view(one) for p in (weight, bias)))

    def patch() -> None:
        for f in (layer_norm, group_norm, instance_norm, batch_norm):
            monkeypatch.setattr(F, f.__name__, f)

    yield patch
    monkeypatch.undo()


def derivative(transform: Callable, name: str, model: nn.Module, loss: Loss) -> list[Tensor | None]:
    """Output, tangent, and every parameter's gradient."""
    torch.manual_seed(1)
    x, v = torch.randn(2, *MODELS[name].shape, dtype=torch.float64)
    u, du = transform(lambda x: MODELS[name].call(model, x), (x,), (v,))[:2]
    found = torch.autograd.grad(loss(u, du), list(model.parameters()), allow_unused=True)
    return [u.detach(), du.detach(), *found]


def compare(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    largest = max(float(x.abs().max()) for x in expected[2:] if x is not None)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), i
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * (largest if i > 1 else 1) + 1e-13)
    assert expected[1] is not None
    assert expected[1].abs().max() > 1e-6


@pytest.mark.parametrize("loss", [past, through])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_an_untouched_copy(name, loss, written_norms):
    model = random_model(name, 0)
    prepared = copy.deepcopy(model)
    prepare(prepared)
    by = {past: jvp, through: lambda *x: jvp(*x, tangent_grad=True)}[loss]
    found = [derivative(by, name, each, loss) for each in (model, prepared)]
    written_norms()
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivative(torch.func.jvp, name, model, loss)
    for each in found:
        compare(each, expected)

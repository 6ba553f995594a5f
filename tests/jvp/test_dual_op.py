import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fullstride.jvp.dual import pack, unpack
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.registration import register
from fullstride.jvp.state import tangent_grad
from fullstride.jvp.transform import jvp
from tests.jvp.derivatives import check_backward, check_forward, check_transforms, close, gradients, ours, torchs

CALLS: list[tuple[Any, ...]] = []


def forward(primals: Any, tangents: Any, settings: Any) -> tuple:
    """Compute x^power w, with one w for all rows, and the tensors that backward saves."""
    (x, w), (tx, tw), (power,) = primals, tangents, settings
    CALLS.append(("forward", *x.shape))
    factor = torch.ones_like(x[0]) if w is None else w
    parts = [] if tx is None else [power * x ** (power - 1) * tx * factor]
    parts += [] if tw is None else [x**power * tw]
    return x**power * factor, sum(parts[1:], parts[0]) if parts else None, x ** (power - 1)


def backward(gy: Tensor, gty: Tensor | None, primals: Any, tangents: Any, saved: Any, settings: Any) -> tuple:
    """Derive the forward by torch, an independent way; check that only needed tensors were saved."""
    (x, w), (tx, tw), (y, ty, last), (power,) = primals, tangents, saved, settings
    CALLS.append(("backward", tx is not None, tw is not None, y is not None, ty is not None))
    assert torch.equal(last, x ** (power - 1))
    given: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, w, tx, tw)]
    with torch.enable_grad():
        out = forward(given[:2], given[2:], settings)
        total = (out[0] * gy).sum() + (0 if gty is None else (out[1] * gty).sum())
        asked = [t for t in given if t is not None]
        found = iter(torch.autograd.grad(total, asked, allow_unused=True, materialize_grads=True))
    of_all = [None if t is None else next(found) for t in given]
    return tuple(of_all if gty is not None else [*of_all[:2], None, None])


def shapes(primals: Any, tangents: Any, settings: Any) -> tuple:
    """Return empty tensors of forward's shapes."""
    x = primals[0]
    ty = None if all(t is None for t in tangents) else torch.empty_like(x)
    return torch.empty_like(x), ty, torch.empty_like(x)


SETTINGS = (("power", "int"),)
ALONE = ("w", "tw")
POWER = DualOp("test_power", ("x", "w"), ("tx", "tw"), SETTINGS, 1, forward, backward, shapes, False, ALONE)
KEEPING = dataclasses.replace(POWER, name="test_power_keeping", keeps_output=True)
OPS = {"shared": register(POWER), "keeping": register(KEEPING)}


def power_of(op: DualOp):
    """The op on duals, cubed."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        (x, tx), (w, tw) = unpack(x), unpack(w)
        return pack(*op((x, w), (tx, tw), (3,), tangent_grad()))

    return call


def reference(x: Tensor, w: Tensor) -> Tensor:
    return x**3 * w


def draw(seed: int, *lead: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, *s, generator=g, dtype=torch.float64) for s in ((4, 3), (3,))]


@pytest.mark.parametrize("name", OPS)
def test_every_way_to_its_derivatives(name, seed):
    op, primals, tangents = power_of(OPS[name]), draw(seed), draw(seed + 10)
    weights = [draw(seed + s)[0] for s in (20, 30)]
    for moved in (tangents, [tangents[0], None], [None, tangents[1]]):
        check_forward(op, reference, primals, moved)
        check_backward(op, reference, primals, moved, weights)
    check_transforms(op, reference, primals, draw(seed + 40, 5), 5)


def kept(name: str, through: bool, absent: bool = False) -> tuple[Any, ...]:
    """Return the tensors that backward received: tx, tw, y, ty."""
    op, primals, tangents = power_of(OPS[name]), draw(0), draw(10)
    CALLS.clear()
    way = ours if through else lambda f, p, t: jvp(f, tuple(p), tuple(t))
    gradients(op, way, primals, [None if absent else tangents[0], tangents[1]], [draw(20)[0]] * 2, through)
    (call,) = (call[1:] for call in CALLS if call[0] == "backward")
    return call


@pytest.mark.parametrize("name", OPS)
def test_backward_is_given_the_tangents_only_where_they_matter(name):
    output = name == "keeping"
    assert kept(name, through=False) == (False, False, output, False)
    assert kept(name, through=True) == (True, True, output, output)
    assert kept(name, through=True, absent=True) == (False, True, output, output)


def test_an_absent_primal_and_no_tangent(seed):
    x, _ = draw(seed)
    y, ty = OPS["shared"]((x.requires_grad_(), None), (None, None), (3,), True)
    close(y, x**3)
    assert ty is None
    close(torch.autograd.grad(y.sum(), x)[0], 3 * x**2)


def test_only_the_output_or_only_its_tangent_may_have_a_gradient(seed):
    op, (x, w), (tx, tw) = power_of(OPS["shared"]), draw(seed), draw(seed + 10)
    for part in (0, 1):
        found, expected = (
            grad(lambda x: torch.func.jvp(f, (x, w), (tx, tw))[part].sin().sum())(x)  # noqa: B023
            for f in (op, reference)
        )
        close(found, expected)


def test_vmap_folds_into_the_batch_unless_what_is_shared_is_mapped(seed):
    op, (x, w), (tx, tw) = power_of(OPS["shared"]), draw(seed), draw(seed + 10, 5)
    CALLS.clear()
    found = vmap(lambda t: torch.func.jvp(lambda x: op(x, w), (x,), (t,))[1])(tx)
    assert CALLS == [("forward", 20, 3)]
    close(found, torch.stack([3 * x**2 * w * t for t in tx]))
    CALLS.clear()
    found = vmap(lambda t: torch.func.jvp(lambda w: op(x, w), (w,), (t,))[1], out_dims=1)(tw)
    assert CALLS == [("forward", 4, 3)] * 5
    close(found, torch.stack([x**3 * t for t in tw], 1))


def test_gradients_are_not_asked_of_what_has_none(seed):
    x, w = draw(seed)

    def asked(through: bool) -> list[bool]:
        y, ty = OPS["shared"]((x, w), (x.cos(), None), (3,), through)
        assert ty is not None
        return [y.requires_grad, ty.requires_grad]

    assert asked(True) == [False, False]
    x.requires_grad_()
    assert asked(True) == [True, True]
    assert asked(False) == [True, False]


def test_a_second_backward_pass_is_refused(seed):
    op, primals, tangents = power_of(OPS["shared"]), draw(seed), draw(seed + 10)
    x = primals[0].requires_grad_()
    (first,) = torch.autograd.grad(torchs(op, primals, tangents)[1].sum(), x, create_graph=True)
    message = "a second derivative by backward passes through .* only a first one; use PyTorch"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("name", OPS)
def test_the_functions_of_an_op_have_its_name(name, seed):
    op = OPS[name]
    x, w = (t.requires_grad_() for t in draw(seed))
    out = power_of(op)(x, w)
    assert type(out.grad_fn).__name__ == f"{op.name}Backward"
    assert (op.forward_function.__name__, op.backward_function.__name__) == (op.name, f"{op.name}_backward")
    assert op.forward_function is op.forward_function

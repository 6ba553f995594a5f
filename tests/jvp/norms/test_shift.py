"""A shift of each channel of each sample inside GroupNorm, against the sum and the norm in fp64."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fullstride import jvp as ops
from fullstride.jvp import group_norm_dual, jvp, partial_jvp
from fullstride.jvp.norms import group_norm, naive
from fullstride.jvp.norms.closed_form import Affine
from fullstride.jvp.norms.dispatch import holds_groups
from fullstride.jvp.norms.written_out import affine, normalised, per_channel
from tests.jvp.norms.cases import EPS, relative_error
from tests.jvp.norms.test_group_norm import LAUNCHES, TOLERANCE, poison  # noqa: F401

NAMES = ("x", "shift", "weight", "bias")
SHAPES = [((3, 6, 5, 7), 3), ((2, 8, 4, 16), 2), ((2, 12, 9), 4)]


def plain(x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, groups: int, act: str | None) -> Tensor:
    moved = (x + shift.reshape(*shift.shape, *[1] * (x.ndim - 2))).unflatten(1, (groups, -1))
    y = normalised(moved, tuple(range(2, moved.ndim)), EPS).flatten(1, 2)
    y = affine(y, per_channel(weight, x), per_channel(bias, x))
    return y if act is None else torch.nn.functional.silu(y)


def drawn(seed: int, shape: tuple[int, ...], last: bool = False) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Primals, tangents, and the gradients of both results, in fp64."""
    g = torch.Generator().manual_seed(seed)
    sizes = [shape, shape[:2], shape[1:2], shape[1:2]]
    both = [[torch.randn(s, generator=g, dtype=torch.float64) * 1.3 + m for s in sizes] for m in (0.7, -0.4)]
    gradients = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2)]
    laid = lambda a: a.contiguous(memory_format=torch.channels_last) if last and a.ndim == 4 else a  # noqa: E731
    primals, tangents = ([*map(laid, each)] for each in both)
    return primals, tangents, [*map(laid, gradients)]


def expected(
    primals: list[Tensor], tangents: list[Tensor], gradients: list[Tensor], groups: int, act: str | None
) -> Any:
    """Both results, and the gradients of all primals and tangents."""
    given = [a.clone().requires_grad_() for a in (*primals, *tangents)]
    found = torch.func.jvp(lambda *p: plain(*p, groups=groups, act=act), tuple(given[:4]), tuple(given[4:]))
    return found, torch.autograd.grad(found, given, tuple(gradients))


def _close(found: Sequence[Tensor | None], right: Sequence[Tensor | None], limit: float) -> bool:
    """Return whether all are near what they should be, and absent where that is."""
    near = lambda a, e: a is None if e is None else a is not None and relative_error(a, e) < limit  # noqa: E731
    return all(near(a, e) for a, e in zip(found, right, strict=True))


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_the_plain_op_is_the_sums_norm(seed, shape, groups, act):
    primals, tangents, gradients = drawn(seed, shape)
    right = expected(primals, tangents, gradients, groups, act)
    given = [a.clone().requires_grad_() for a in (*primals, *tangents)]
    (x, shift, weight, bias), (tx, tshift, tweight, tbias) = given[:4], given[4:]
    own = x, groups, weight, bias, tx, tweight, tbias
    found: Any = group_norm_dual(*own, shift=shift, tshift=tshift, eps=EPS, act=act, implementation="plain")
    torch.testing.assert_close(found, right[0])
    torch.testing.assert_close(torch.autograd.grad(found, given, tuple(gradients)), right[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_kernels_sums_norm(seed, launch, dtype):
    place = list(LAUNCHES).index(launch)
    (shape, groups), act = SHAPES[place % 3], (None, "silu")[place % 2]
    drawn_ = drawn(seed, shape, last=place % 2 == 0)
    primals, tangents, gradients = ([a.to(dtype) for a in each] for each in drawn_)
    full = [[a.double() for a in each] for each in (primals, tangents, gradients)]
    (y, ty), right = expected(*full, groups=groups, act=act)
    (x, shift, w, b), (tx, tshift, tw, tb) = primals, tangents
    config, both, shifts = LAUNCHES[launch], Affine(w, b, tw, tb), (shift, tshift)
    found_y, found_ty, *moments = group_norm.group_norm(x, tx, groups, both, EPS, act, config=config, shifts=shifts)
    found = group_norm.group_norm_backward(
        gradients[0], gradients[1], x, tx, groups, both, tuple(moments), act, config, shifts
    )
    order = right[0], right[4], right[2], right[3], right[6], right[7], right[1], right[5]
    limit = 4 * TOLERANCE[dtype]
    assert _close((found_y, found_ty, *found), (y, ty, *order), limit)
    detached = group_norm.group_norm_backward(
        gradients[0], None, x, tx, groups, both, tuple(moments), act, config, shifts
    )
    _, of_y = expected(full[0], full[1], [full[2][0], torch.zeros_like(full[2][1])], groups, act)
    wanted = of_y[0], None, of_y[2], of_y[3], None, None, of_y[1], None
    assert _close(detached, wanted, limit)


def test_the_kernel_takes_tangents_of_the_first_samples(seed):
    (x, shift, w, b), (tx, tshift, *_), _ = ([a.float() for a in each] for each in drawn(seed, (3, 8, 4, 16)))
    first = slice(2)
    y, ty, *_ = group_norm.group_norm(
        x, tx[first], 2, Affine(w, b), EPS, "silu", config=LAUNCHES["side_by_side"], shifts=(shift, tshift[first])
    )
    zeros = torch.zeros_like(w).double(), torch.zeros_like(b).double()
    primals, tangents = [a.double() for a in (x, shift, w, b)], [tx.double(), tshift.double(), *zeros]
    right, _ = expected(primals, tangents, [torch.zeros_like(primals[0])] * 2, 2, "silu")
    assert _close((y, ty), (right[0], right[1][first]), 2e-5)


@pytest.mark.parametrize(
    "shape", [(2, 6, 4, 5), (1, 6, 90, 121)]
)  # a group that stays on the chip, and one that does not
@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1)])
def test_under_jvp_either_may_move(seed, shape, moving):
    primals, tangents, _ = drawn(seed, shape)
    assert holds_groups(primals[0].bfloat16(), 3, "silu") == (shape[0] == 2)

    def of(norm):
        return lambda *moved: norm(*(moved[moving.index(i)] if i in moving else p for i, p in enumerate(primals)))

    own = of(lambda x, s, w, b: ops.group_norm(x, 3, w, b, EPS, "silu", shift=s))
    given = tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
    right = torch.func.jvp(of(lambda *p: plain(*p, groups=3, act="silu")), *given)
    torch.testing.assert_close(jvp(own, *given)[:2], right)
    torch.testing.assert_close(torch.func.jvp(own, *given), right)


@pytest.mark.parametrize("size", [(4, 5), (90, 121)])
@pytest.mark.parametrize("shifted", [False, True])
def test_of_a_batch_of_which_some_move(seed, shifted, size):
    (x, shift, w, b), (tx, tshift, *_), _ = drawn(seed, (3, 6, *size))
    own = lambda x, s: ops.group_norm(x, 3, w, b, EPS, "silu", shift=s if shifted else shift)  # noqa: E731
    y, ty = partial_jvp(own, (x, shift), (tx[:2], tshift[:2]))
    f = lambda x, s: plain(x, s if shifted else shift[:2], w, b, 3, "silu")  # noqa: E731
    torch.testing.assert_close(y, plain(x, shift, w, b, 3, "silu"))
    torch.testing.assert_close(ty, torch.func.jvp(f, (x[:2], shift[:2]), (tx[:2], tshift[:2]))[1])


def test_without_a_tangent_and_in_other_formats_it_is_the_sums_norm(seed):
    (x, shift, w, b), _, _ = drawn(seed, (2, 6, 4, 5))
    right = plain(x, shift, w, b, 3, "silu")
    torch.testing.assert_close(ops.group_norm(x, 3, w, b, EPS, "silu", shift=shift), right)
    found = ops.group_norm(x.bfloat16(), 3, w.float(), b.float(), EPS, "silu", shift=shift.float(), dtype=torch.float32)
    assert relative_error(found, right) < 2e-2


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3), (2, 6, 1)])
def test_a_shift_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"shift is .* expected one number a channel of each sample: \(2, 6\)"):
        inspect.unwrap(ops.group_norm)(torch.randn(2, 6, 4), 3, shift=torch.randn(shape), implementation="plain")


def test_sizes_that_no_kernel_takes(seed):
    x, shift = torch.randn(2, 5000, 1, dtype=torch.float64), torch.randn(2, 5000, dtype=torch.float64)
    ones = torch.ones(5000, dtype=torch.float64)
    right = plain(x, shift, ones, 0 * ones, 1, None)
    torch.testing.assert_close(ops.group_norm(x, 1, eps=EPS, shift=shift), right)
    assert ops.group_norm(x[..., :0], 4, shift=shift).shape == (2, 5000, 0)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"groups is {groups}, expected a divisor of the 5000 channels"):
            ops.group_norm(x, groups, shift=shift, implementation="plain")


def test_nothing_is_normalised_of_nothing():
    y, ty, *_ = naive.group_norm(torch.empty(0, 6, 4), None, 3, Affine(), EPS, shifts=(torch.empty(0, 6), None))
    assert y.shape == (0, 6, 4)
    assert ty is None

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import grad, jacfwd, vmap

from fullstride.jvp import ada_layer_norm, group_norm, jvp, layer_norm, rms_norm
from fullstride.jvp.norms import dispatch, group_configs, row_configs
from tests.jvp import plain_ops
from tests.jvp.derivatives import (
    check_backward,
    check_forward,
    check_transforms,
    close,
    detached,
    dual_level,
    gradients,
    ours,
    torchs,
)

Call = Callable[..., Tensor]


def library_group_norm(x, groups, weight=None, bias=None, eps=1e-5, act=None):
    y = F.group_norm(x, groups, weight, bias, eps)
    return y if act is None else F.silu(y)


def library_ada(x, scale, shift, eps=1e-6):
    one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale.reshape(one)) + shift.reshape(one)


def calls(
    name: str, groups: int | None = None, implementation: str = "auto", **options: Any
) -> tuple[Call, Call, Call]:
    """Return our norm, one in elementary operations, and torch's; all take (x, parameters)."""
    named = {"implementation": implementation}
    if groups is not None:
        of = lambda f, **how: lambda x, *p: f(x, groups, *p, **options, **how)  # noqa: E731
        return of(group_norm, **named), of(plain_ops.group_norm), of(library_group_norm)
    library = {
        "layer_norm": lambda x, *p: F.layer_norm(x, x.shape[-1:], *p, **options),
        "rms_norm": lambda x, *p: F.rms_norm(x, x.shape[-1:], *p, **options),
        "ada_layer_norm": functools.partial(library_ada, **options),
    }
    ours = {"layer_norm": layer_norm, "rms_norm": rms_norm, "ada_layer_norm": ada_layer_norm}
    plain = functools.partial(getattr(plain_ops, name), **options)
    return functools.partial(ours[name], **options, **named), plain, library[name]


# The name of the op, the shapes of its tensors, its settings.
CASES: dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any]]] = {
    "layer_norm": ("layer_norm", [(2, 5, 7), (7,), (7,)], {}),
    "layer_norm_weight": ("layer_norm", [(3, 9), (9,)], {"eps": 0.1}),
    "layer_norm_alone": ("layer_norm", [(2, 3, 2, 5)], {}),
    "rms_norm": ("rms_norm", [(2, 5, 7), (7,)], {}),
    "rms_norm_alone": ("rms_norm", [(6, 5)], {"eps": 0.2}),
    "ada_layer_norm": ("ada_layer_norm", [(2, 5, 7), (2, 1, 7), (2, 1, 7)], {}),
    "ada_layer_norm_rows": ("ada_layer_norm", [(4, 9), (4, 9), (4, 9)], {"eps": 0.05}),
    "group_norm": ("group_norm", [(2, 6, 3, 5), (6,), (6,)], {"groups": 3}),
    "group_norm_silu": ("group_norm", [(2, 6, 3, 5), (6,), (6,)], {"groups": 2, "act": "silu"}),
    "group_norm_one_group": ("group_norm", [(3, 4, 7), (4,)], {"groups": 1, "eps": 0.1}),
    "group_norm_alone_silu": ("group_norm", [(2, 4, 2, 3, 2)], {"groups": 4, "act": "silu"}),
}


def draw(name: str, seed: int, stack: int | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The tensors of a case."""
    g = torch.Generator().manual_seed(seed)
    lead = () if stack is None else (stack,)
    return [torch.randn(*lead, *s, generator=g, dtype=torch.float64).to(dtype) + 0.3 for s in CASES[name][1]]


def ops(name: str) -> tuple[Call, Call, Call]:
    return calls(CASES[name][0], **CASES[name][2])


def weights_for(name: str, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed + 70)
    return list(torch.randn(2, *CASES[name][1][0], generator=g, dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_output_and_tangent_by_every_way(name, seed):
    op, reference, _ = ops(name)
    check_forward(op, reference, draw(name, seed), draw(name, seed + 10))


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_every_way(name, seed):
    op, reference, _ = ops(name)
    check_backward(op, reference, draw(name, seed), draw(name, seed + 10), weights_for(name, seed))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "ada_layer_norm", "group_norm_silu"])
def test_transforms_of_its_derivative(name):
    op, reference, _ = ops(name)
    check_transforms(op, reference, draw(name, 0), draw(name, 10, stack=3), 3)


@pytest.mark.parametrize("present", [0, 1, 2])
@pytest.mark.parametrize("name", ["layer_norm", "ada_layer_norm", "group_norm", "group_norm_silu"])
def test_absent_tangents_are_zero(name, present, seed):
    op, reference, _ = ops(name)
    primals = draw(name, seed)
    tangents = [t if i == present else None for i, t in enumerate(draw(name, seed + 10))]
    check_forward(op, reference, primals, tangents)
    check_backward(op, reference, primals, tangents, weights_for(name, seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_without_a_tangent_it_is_the_librarys(name, dtype, seed):
    op, _, library = ops(name)
    given = draw(name, seed, dtype=dtype)
    assert torch.equal(op(*given), library(*given))
    _, _, aux = jvp(lambda x: (x * 2, op(*given)), (given[0],), (given[0],), has_aux=True)
    assert torch.equal(aux, library(*given))


@pytest.mark.parametrize("name", CASES)
def test_without_a_tangent_the_plain_form_is_the_same(name, seed):
    kind, _, settings = CASES[name]
    op, _, _ = calls(kind, **settings, implementation="plain")
    _, reference, _ = ops(name)
    given = [x.requires_grad_() for x in draw(name, seed)]
    found, expected = op(*given), reference(*given)
    close(found, expected)
    pairs = (torch.autograd.grad(o.sin().sum(), given) for o in (found, expected))
    close(*pairs)


@pytest.mark.parametrize("act", [None, "silu"])
def test_channels_last_stays_channels_last(act, seed):
    g = torch.Generator().manual_seed(seed)
    x, tx = torch.randn(2, 2, 6, 4, 5, generator=g, dtype=torch.float64)
    x, tx = (a.contiguous(memory_format=torch.channels_last) for a in (x, tx))
    op, reference, _ = calls("group_norm", groups=3, act=act)
    expected = torchs(reference, [x], [tx])
    for way in (ours, torchs, dual_level, detached):
        y, ty = way(op, [x], [tx])
        close((y, ty), expected)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert ty.is_contiguous(memory_format=torch.channels_last)
    check_backward(op, reference, [x], [tx], [x.sin(), tx.cos()])


@pytest.mark.parametrize("name", CASES)
def test_gradcheck_forward_and_reverse(name):
    op, _, _ = ops(name)
    given = tuple(x.requires_grad_() for x in draw(name, 0))
    assert gradcheck(op, given, fast_mode=True, check_forward_ad=True)
    points = (*given, *(x.requires_grad_() for x in draw(name, 10)))
    n = len(given)
    assert gradcheck(lambda *x: jvp(op, x[:n], x[n:], tangent_grad=True), points, fast_mode=True)


def test_jacobians(seed):
    x, weight, bias = draw("layer_norm", seed)
    found, expected = (jacfwd(f, argnums=(0, 1, 2))(x, weight, bias) for f in (layer_norm, plain_ops.layer_norm))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_errors_are_no_larger_than_eagers_in_the_same_dtype(name, dtype, seed):
    op, reference, library = ops(name)
    primals, tangents = draw(name, seed, dtype=dtype), draw(name, seed + 10, dtype=dtype)
    exact = torchs(reference, [x.double() for x in primals], [x.double() for x in tangents])
    eager = torchs(library, primals, tangents)
    for found, by_eager, expected in zip(ours(op, primals, tangents), eager, exact, strict=True):
        assert found.dtype == dtype
        error, eagers = ((x.double() - expected).norm() / expected.norm() for x in (found, by_eager))
        assert error < max(2 * eagers, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_autocast_is_that_of_the_library(name, dtype, seed):
    op, reference, library = ops(name)
    primals, tangents = draw(name, seed, dtype=dtype), draw(name, seed + 10, dtype=dtype)
    exact = torchs(reference, [x.double() for x in primals], [x.double() for x in tangents])
    with torch.autocast("cpu", torch.bfloat16):
        expected_dtype = library(*primals).dtype
        found = [way(op, primals, tangents) for way in (ours, torchs, dual_level, detached)]
    for pair in found:
        for x, expected in zip(pair, exact, strict=True):
            assert x.dtype == expected_dtype
            assert (x.double() - expected).norm() < 0.01 * expected.norm()


def test_ada_keeps_xs_dtype_with_and_without_a_tangent(seed):
    x, scale, shift = draw("ada_layer_norm", seed)
    for given in ((x.bfloat16(), scale.float(), shift.float()), (x.float(), scale.bfloat16(), shift.bfloat16())):
        with_tangent, _ = jvp(ada_layer_norm, given, (given[0], None, None))
        assert ada_layer_norm(*given).dtype == with_tangent.dtype == given[0].dtype


def test_torchs_own_layer_norm_has_wrong_gradients_through_its_derivative(seed):
    """Reverse over forward of `F.layer_norm` is wrong in PyTorch (2.13), which finite differences of its own tangent
    show; forward over reverse, and all of group_norm's and rms_norm's, are right. `fullstride.jvp.layer_norm` is, too.
    """
    x, t = (draw("layer_norm_weight", s)[0] for s in (seed, seed + 10))

    def slope(f: Call) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.jvp(f, (x,), (t,))[1].sin().sum()

    def differences(f: Call, h: float = 1e-5) -> Tensor:
        """The gradient of the slope along t."""
        return (slope(f)(x + h * t) - slope(f)(x - h * t)) / (2 * h)

    torchs_own: Call = lambda x: F.layer_norm(x, (9,))  # noqa: E731
    expected = differences(torchs_own)
    for right in (layer_norm, plain_ops.layer_norm):
        torch.testing.assert_close((grad(slope(right))(x) * t).sum(), expected, rtol=1e-6, atol=1e-7)
    assert ((grad(slope(torchs_own))(x) * t).sum() - expected).abs() > 1e-3 * expected.abs()
    others: list[Call] = [lambda x: F.group_norm(x, 3), lambda x: F.rms_norm(x, (9,))]
    for other in others:
        torch.testing.assert_close((grad(slope(other))(x) * t).sum(), differences(other), rtol=1e-6, atol=1e-7)
    first: Callable[[Call], Call] = lambda f: grad(lambda x: f(x).sin().sum())  # noqa: E731
    close(*(torch.func.jvp(first(f), (x,), (t,))[1] for f in (torchs_own, plain_ops.layer_norm)))


free = inspect.unwrap  # of the tests' own checks of shapes, which a user does not have
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "weight": (lambda x: free(layer_norm)(x, x[0, 0, :3]), r"weight is \(3,\), expected \(8,\)"),
    "bias": (lambda x: free(layer_norm)(x, None, x[0, 0, :3]), r"bias is \(3,\), expected \(8,\)"),
    "rms weight": (lambda x: free(rms_norm)(x, x[0, :, 0]), r"weight is \(6,\), expected \(8,\)"),
    "scale": (
        lambda x: free(ada_layer_norm)(x, x, x[:, 0]),
        r"scale is \(2, 6, 8\), expected one row per sample",
    ),
    "shift": (lambda x: free(ada_layer_norm)(x, x[:, 0], x[:1, 0]), r"shift is \(1, 8\), expected one row per sample"),
    "groups": (lambda x: free(group_norm)(x, 4), "groups is 4, expected a divisor of the 6 channels"),
    "no group": (lambda x: free(group_norm)(x, 0), "groups is 0, expected a divisor"),
    "group weight": (lambda x: free(group_norm)(x, 2, x[0, 0]), r"weight is \(8,\), expected \(6,\)"),
    "act": (lambda x: free(group_norm)(x, 2, act="gelu"), "act is 'gelu', expected None or 'silu'"),
    "no rows": (lambda x: free(layer_norm)(x[0, 0, 0]), r"x is \(\), expected \(..., D\)"),
    "no root rows": (lambda x: free(rms_norm)(x[0, 0, 0]), r"x is \(\), expected \(..., D\)"),
    "no samples": (
        lambda x: free(ada_layer_norm)(x[0, 0], x[0], x[0]),
        r"x is \(8,\), expected \(B, ..., D\)",
    ),
    "no channels": (lambda x: free(group_norm)(x[0, 0], 2), r"x is \(8,\), expected \(B, C, ...\)"),
    "implementation": (
        lambda x: free(layer_norm)(x, implementation="cuda"),
        "implementation is 'cuda', expected one of",
    ),
    "triton": (
        lambda x: free(rms_norm)(x, implementation="triton"),
        "implementation is 'triton' and .* use impl",
    ),
}


def test_the_shape_that_torchs_norms_take_is_no_weight():
    with pytest.raises(ValueError, match=r"weight is a tuple, expected a tensor of \(8,\), or None"):
        free(dispatch._check)(torch.ones(2, 8), 1, "(..., D)", weight=(8,))


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    call, message = WRONG[name]
    x = torch.ones(2, 6, 8)
    for run in (lambda: call(x), lambda: jvp(call, (x,), (x,))):
        with pytest.raises(ValueError, match=message):
            run()


def test_a_second_backward_pass_is_refused(seed):
    op, _, _ = ops("group_norm_silu")
    primals, tangents = ([x.requires_grad_() for x in draw("group_norm_silu", s)] for s in (seed, seed + 10))
    _, ty = ours(op, primals, tangents)
    (first,) = torch.autograd.grad(ty.sin().sum(), primals[:1], create_graph=True)
    with pytest.raises(
        RuntimeError, match="a second derivative .* fullstride's group_norm, which has only a first one; use PyTorch"
    ):
        torch.autograd.grad(first.sum(), primals[:1])


def test_a_gradient_of_the_librarys_own_may_be_differentiated_forward(seed):
    """Without a tangent the op is torch's, with torch's derivatives; `implementation="plain"` refuses."""
    x, t = (draw("rms_norm_alone", s)[0] for s in (seed, seed + 10))
    slope = lambda f: lambda x: torch.func.jvp(grad(lambda x: f(x).sin().sum()), (x,), (t,))[1]  # noqa: E731
    close(slope(rms_norm)(x), slope(plain_ops.rms_norm)(x))
    with pytest.raises(RuntimeError, match="a jvp of a gradient"):
        slope(functools.partial(rms_norm, implementation="plain"))(x)


@pytest.mark.parametrize(("fused", "plain"), [(layer_norm, plain_ops.layer_norm), (rms_norm, plain_ops.rms_norm)])
def test_single_rows_under_vmap_are_each_their_own(fused, plain, seed):
    torch.manual_seed(seed)
    rows, moves = torch.randn(2, 5, 7, dtype=torch.float64)
    through = lambda f: lambda x, t: torch.func.jvp(f, (x,), (t,))  # noqa: E731
    close(vmap(through(fused))(rows, moves), through(plain)(rows, moves))
    close(jacfwd(fused)(rows[0]), jacfwd(plain)(rows[0]))
    gradient = lambda f: grad(lambda x, t: through(f)(x, t)[1].sin().sum())  # noqa: E731
    close(vmap(gradient(fused))(rows, moves), gradient(plain)(rows, moves))


def test_the_gradient_past_a_detached_tangent_does_not_see_it(seed):
    op, _, library = ops("layer_norm")
    primals, tangents = draw("layer_norm", seed), draw("layer_norm", seed + 10)
    weights = weights_for("layer_norm", seed)
    found = gradients(op, detached, primals, tangents, [weights[0], 0 * weights[1]], through=False)
    leaves = [x.requires_grad_() for x in primals]
    close(found, list(torch.autograd.grad((library(*leaves) * weights[0]).sum(), leaves)))


def test_auto_knows_what_the_tables_hold():
    assert dispatch.LONGEST_ROW == row_configs.LONGEST
    assert dispatch.MOST_CHANNELS == group_configs.MOST_LANES

import dataclasses

import pytest
import torch

from fullstride.jvp.norms import naive
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from tests.jvp.norms.cases import EPS, Case, reference_dual, reference_gradients, relative_error

NO_TANGENT = frozenset({"tx", "tweight", "tbias"})
PLAIN = frozenset({"weight", "bias", "tweight", "tbias"})
ABSENT = [
    frozenset(),
    frozenset({"tx"}),
    frozenset({"tweight"}),
    frozenset({"tbias"}),
    frozenset({"tweight", "tbias"}),
    frozenset({"tx", "tweight"}),
    frozenset({"bias", "tbias"}),
]
ROWS = [Case(op, (3, 5, 7), absent=a) for op in ("layer_norm", "rms_norm") for a in [*ABSENT, PLAIN]]
ADA = [Case("ada_layer_norm", shape, absent=a) for shape in ((3, 5, 7), (4, 9)) for a in ABSENT[:6]]
GROUPS = [Case("group_norm", (2, 6, 5), 3, absent=a) for a in [*ABSENT, PLAIN]] + [
    Case("group_norm", shape, groups, act, last, a)
    for shape, groups, last in (((2, 6, 3, 5), 2, True), ((3, 4, 2, 3, 3), 4, True), ((2, 5, 3), 1, False))
    for act in (None, "silu")
    for a in (frozenset[str](), PLAIN, frozenset({"tx", "tweight"}))
]
CASES = [c for c in [*ROWS, *ADA, *GROUPS] if c.absent != {"tx", "tweight"} or c.op != "rms_norm"]


def assert_equal(got, want):
    """Compare to the rounding of fp64."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_torchs_own_jvp(case, seed):
    inputs = case.draw(seed)
    y, ty, *moments = inputs.forward(naive)
    expected, expected_t = reference_dual(inputs)
    assert_equal((y, ty), (expected, expected_t))
    assert y.stride() == ty.stride() == inputs.x.stride()
    rows = inputs.x.unflatten(1, (case.groups, -1)).flatten(2) if case.op == "group_norm" else inputs.x
    mean = rows.mean(-1) if case.op != "rms_norm" else torch.zeros(())
    square = (rows - mean[..., None]).square().mean(-1) if case.op != "rms_norm" else rows.square().mean(-1)
    assert_equal(moments[-1], (square + EPS).rsqrt())
    if len(moments) == 2:
        assert_equal(moments[0], mean)


@pytest.mark.parametrize("detached", [False, True], ids=["full", "detached"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_is_torchs_autograd_through_its_jvp(case, detached, seed):
    inputs = case.draw(seed)
    moments = inputs.forward(naive)[2:]
    found = inputs.backward(naive, moments, detached)
    expected = reference_gradients(inputs, detached)
    of = (inputs.x, inputs.tx, *inputs.parameters)
    without = (detached and [1, *range(len(of) // 2 + 1, len(of))]) or []
    for i, (got, want, model) in enumerate(zip(found, expected, of, strict=True)):
        if model is None or i in without:
            assert got is None
        else:
            assert_equal(got, want if want is not None else torch.zeros_like(model))
            assert got.stride() == model.stride()


@pytest.mark.parametrize("case", [Case(op, (2, 6, 4), 3, absent=NO_TANGENT) for op in ("layer_norm", "group_norm")])
def test_without_any_tangent_there_is_none(case, seed):
    inputs = case.draw(seed)
    y, ty, *moments = inputs.forward(naive)
    assert ty is None
    assert_equal(y, reference_dual(inputs)[0])
    assert inputs.backward(naive, moments, detached=True)[1] is None


@pytest.mark.parametrize("act", [None, "silu"])
def test_the_gradients_pass_gradcheck(act, seed):
    """The derivative of gy . y + gty . ty by central differences, past torch's own formulas."""
    inputs = Case("group_norm", (2, 4, 3), 2, act).draw(seed)
    found = inputs.backward(naive, inputs.forward(naive)[2:])
    names = ("x", "tx", "weight", "bias", "tweight", "tbias")
    given = vars(inputs)
    h = 1e-6
    for name, gradient in zip(names, found, strict=True):
        direction = torch.randn_like(given[name])
        losses = []
        for sign in (1, -1):
            moved = dataclasses.replace(inputs, **{name: given[name] + sign * h * direction})
            y, ty, *_ = moved.forward(naive)
            losses.append((y * inputs.gy).sum() + (ty * inputs.gty).sum())
        slope = (losses[0] - losses[1]) / (2 * h)
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [ROWS[0], ADA[0], GROUPS[8], GROUPS[11]], ids=str)
def test_half_precision_is_computed_in_fp32_and_rounded_once(case, dtype, seed):
    inputs = case.draw(seed, dtype)
    exact = inputs.to(torch.float64)
    y, ty, *moments = inputs.forward(naive)
    assert y.dtype == ty.dtype == dtype
    assert moments[-1].dtype == torch.float32
    rounding = torch.finfo(dtype).eps
    for got, want in zip((y, ty), reference_dual(exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0.51 * rounding, atol=1e-5)
    for got, want in zip(inputs.backward(naive, moments), reference_gradients(exact), strict=True):
        if want is not None:
            assert got is not None
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=0.51 * rounding, atol=1e-4)


def test_scale_and_shift_may_be_strided_views_of_three_dimensions(seed):
    case = Case("ada_layer_norm", (3, 5, 7))
    inputs = case.draw(seed)
    packed = torch.stack([p for p in inputs.parameters if p is not None], 1)[:, :, None]
    affine = Affine(*packed.unbind(1))
    y, ty, *moments = naive.row_norm(ROW_NORMS["ada_layer_norm"], inputs.x, inputs.tx, affine, EPS)
    for got, want in zip((y, ty), reference_dual(inputs), strict=True):
        assert_equal(got, want)
    gradients, x = (inputs.gy, inputs.gty), (inputs.x, inputs.tx)
    found = naive.row_norm_backward(ROW_NORMS["ada_layer_norm"], *gradients, *x, affine, tuple(moments))
    for got, want in zip(found[2:], reference_gradients(inputs)[2:], strict=True):
        assert got is not None
        assert want is not None
        assert_equal(got, want[:, None])


@pytest.mark.parametrize("op", ["layer_norm", "group_norm"])
def test_a_mean_a_thousand_times_the_deviation(op, seed):
    inputs = Case(op, (3, 8, 64), 2).draw(seed, torch.float32)
    inputs = dataclasses.replace(inputs, x=inputs.x + 1000)
    exact = inputs.to(torch.float64)
    for got, want in zip(inputs.forward(naive, 1e-5), reference_dual(exact, 1e-5), strict=False):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
def test_large_images_are_as_exact_as_small_ones_in_any_layout(channels_last, seed):
    """A sum over 45,000 elements one by one is off by 1e-6 and more."""
    inputs = Case("group_norm", (1, 64, 150, 150), 32, "silu", channels_last).draw(seed, torch.float32)
    exact = inputs.to(torch.float64)
    y, ty, *moments = inputs.forward(naive)
    for got, want in zip((y, ty), reference_dual(exact), strict=True):
        assert relative_error(got, want) < 2e-7
    for got, want in zip(inputs.backward(naive, moments), reference_gradients(exact), strict=True):
        assert got is not None
        assert relative_error(got, want) < 5e-7


def test_an_unknown_activation_is_refused(seed):
    inputs = Case("group_norm", (2, 4, 3), 2, "gelu").draw(seed)
    with pytest.raises(ValueError, match="act is 'gelu', expected None or 'silu'"):
        inputs.forward(naive)

import dataclasses

import pytest
import torch

from fullstride.jvp.norms import group_norm, naive
from fullstride.jvp.norms.closed_form import Affine
from fullstride.jvp.norms.group_configs import GroupConfig, GroupSize, group_config
from tests.jvp.norms.cases import EPS, Case, reference_dual, reference_gradients, relative_error

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter's
]

NO_TANGENT = frozenset({"tx", "tweight", "tbias"})
ABSENT = [
    frozenset(),
    frozenset({"tx"}),
    frozenset({"tweight", "tbias"}),
    NO_TANGENT,
    frozenset({"weight", "bias", "tweight", "tbias"}),
]
# 6 channels of 3 groups with 35 pixels: padded channels, padded pixels, a block with a group too many.
SHAPES = [((2, 6, 5, 7), 3), ((2, 8, 5, 7), 2), ((1, 3, 5, 7), 1), ((2, 12, 1), 3)]
LAUNCHES = {
    "on_chip": GroupConfig(groups=1, pixels=64, warps=1),
    "side_by_side": GroupConfig(groups=2, pixels=64, warps=1),
    "in_pieces": GroupConfig(groups=2, pixels=64, warps=1, pieces=4, packed=True),
    "walked": GroupConfig(groups=2, pixels=16, warps=1),
    "split": GroupConfig(groups=1, pixels=16, warps=1, chunks=3),
    "split_side_by_side": GroupConfig(groups=4, pixels=8, warps=1, chunks=2),
}
CASES = [
    (Case("group_norm", shape, groups, act, last and len(shape) == 4), launch)
    for i, (shape, groups) in enumerate(SHAPES)
    for j, launch in enumerate(LAUNCHES)
    for act, last in (((None, True), ("silu", False), (None, False), ("silu", True))[(i + j) % 4],)
]
CASES += [
    (Case("group_norm", (2, 6, 5, 7), 3, act, True, absent), launch)
    for absent in ABSENT[1:]
    for act, launch in ((None, "on_chip"), ("silu", "walked"))
]
CASES += [(Case("group_norm", (2, 6, 5, 7), 3, None, False, ABSENT[i]), "split") for i in (1, 3)]
CASES += [(Case("group_norm", (2, 4, 3, 2, 5), 2, "silu", True), "walked")]
# fp32: sums of some hundred terms; fp16: the rounding of the result.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3}


def every(step: int) -> list:
    """Return all cases, of which all but every so many are thorough."""
    return [pytest.param(*each, marks=pytest.mark.thorough) if i % step else each for i, each in enumerate(CASES)]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill outputs with NaN first, so that unwritten elements show."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


def check(inputs, config, detached=False):
    """Forward and backward of these inputs against fp64."""
    exact = inputs.to(torch.float64)
    y, ty, *moments = inputs.forward(group_norm, config=config)
    assert (ty is None) == (inputs.case.absent >= NO_TANGENT)
    found = inputs.backward(group_norm, moments, detached, config=config)
    assert [g is None for g in found] == [g is None for g in inputs.backward(naive, moments, detached)]
    models = (inputs.x, inputs.x, inputs.x, inputs.tx, *inputs.parameters)
    expected = (*reference_dual(exact), *reference_gradients(exact, detached))
    for got, want, model in zip((y, ty, *found), expected, models, strict=True):
        if got is not None:
            assert relative_error(got, want) < TOLERANCE[got.dtype]
            assert (got.dtype, got.shape, got.stride()) == (model.dtype, model.shape, model.stride())
    for got, want in zip(moments, inputs.forward(naive)[2:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "launch"),
    [
        # Every other shape of a launch; all of what may be absent.
        pytest.param(*each, marks=pytest.mark.thorough) if i < 24 and (i + i // len(LAUNCHES)) % 2 else each
        for i, each in enumerate(CASES)
    ],
    ids=str,
)
def test_all_agrees_with_fp64(case, launch):
    check(case.draw(CASES.index((case, launch)), torch.float32), LAUNCHES[launch], detached=case.absent >= NO_TANGENT)


@pytest.mark.parametrize(("case", "launch"), every(5), ids=str)
def test_a_detached_tangent_leaves_the_plain_gradients(case, launch):
    check(case.draw(3, torch.float32), LAUNCHES[launch], detached=True)


@pytest.mark.parametrize(("case", "launch"), every(7), ids=str)
def test_half_precision(case, launch):
    check(case.draw(4, torch.float16), LAUNCHES[launch], detached=case.absent >= NO_TANGENT)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [((2, 8, 4, 4), 2), ((1, 10, 40, 40), 1), ((1, 8, 3, 3), 8)])
def test_the_chosen_launch(shape, groups, last):
    check(Case("group_norm", shape, groups, "silu", last).draw(5, torch.float32), None)


def test_weights_in_fp32_beside_half_precision_activations(seed):
    half = Case("group_norm", (2, 6, 5, 7), 3, "silu").draw(seed, torch.float16)
    mixed = dataclasses.replace(half.to(torch.float32), x=half.x, tx=half.tx, gy=half.gy, gty=half.gty)
    check(mixed, LAUNCHES["side_by_side"])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_mean_a_thousand_times_the_deviation(launch):
    """The rounding of the mean decides the error: 1000 / 1 times that of fp32, times what the gradients make of it."""
    inputs = Case("group_norm", (2, 6, 5, 7), 3).draw(len(launch), torch.float32)
    inputs = dataclasses.replace(inputs, x=inputs.x + 1000)
    y, ty, *moments = inputs.forward(group_norm, config=LAUNCHES[launch])
    exact = inputs.to(torch.float64)
    expected = (*reference_dual(exact), *reference_gradients(exact))
    for got, want in zip(
        (y, ty, *inputs.backward(group_norm, moments, config=LAUNCHES[launch])), expected, strict=True
    ):
        assert relative_error(got, want) < 1e-3


def test_neighbouring_channels_are_read_together():
    small = GroupSize(64, 32, 4, 64, True, 2)
    assert group_config("forward", small).groups == 8
    assert group_config("forward", small._replace(channels_last=False)).groups == 1
    assert group_config("forward", small._replace(pixels=65536)).groups == 8
    assert group_config("forward", small._replace(pixels=1024)).groups == 4


def test_few_large_groups_are_split():
    large = GroupSize(1, 32, 4, 65536, False, 2)
    assert group_config("forward", large).chunks > 1
    assert group_config("forward", large._replace(samples=64)).chunks == 1


def test_what_does_not_fit_is_refused(seed):
    with pytest.raises(ValueError, match="groups of 4097 channels, expected at most 4096"):
        group_norm.group_norm(torch.zeros(1, 4097, 2), None, 1, Affine(), 1e-5)
    with pytest.raises(ValueError, match="act is 'gelu', expected None or 'silu'"):
        Case("group_norm", (2, 4, 3), 2, "gelu").draw(seed).forward(group_norm)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("shape", "groups", "last"), [((5, 8, 8, 8), 4, True), ((5, 6, 5, 7), 3, False)])
def test_a_tangent_of_the_first_samples_alone(shape, groups, last, launch, seed):
    inputs = Case("group_norm", shape, groups, "silu", last, frozenset({"tweight", "tbias"})).draw(seed, torch.float32)
    assert inputs.tx is not None
    y, ty, *moments = group_norm.group_norm(
        inputs.x, inputs.tx[:2], groups, Affine(*inputs.parameters[:2]), EPS, "silu", config=LAUNCHES[launch]
    )
    whole, whole_ty = reference_dual(inputs.to(torch.float64))
    assert ty is not None
    assert ty.shape == (2, *shape[1:])
    assert ty.stride() == inputs.x[:2].stride()
    assert relative_error(y, whole) < 5e-6
    assert relative_error(ty, whole_ty[:2]) < 5e-6
    assert all(m.isfinite().all() for m in moments)


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (0, 4), (2, 4, 0)])
@pytest.mark.parametrize("absent", [frozenset(), NO_TANGENT])
def test_nothing_to_normalise(shape, absent):
    x, tx = torch.ones(shape), None if "tx" in absent else torch.ones(shape)
    weight, tweight = torch.ones(4), None if "tweight" in absent else torch.ones(4)
    affine = Affine(weight, weight, tweight, tweight)
    y, ty, *moments = group_norm.group_norm(x, tx, 2, affine, EPS, "silu")
    assert y.shape == shape
    assert (None if ty is None else ty.shape) == (None if tx is None else shape)
    assert all(m.shape == (shape[0], 2) for m in moments)
    dx, dtx, *of_parameters = group_norm.group_norm_backward(x, tx, x, tx, 2, affine, tuple(moments), "silu")[:6]
    assert dx is not None
    assert dx.shape == shape
    assert (None if dtx is None else dtx.shape) == (None if tx is None else shape)
    assert all((g == 0).all() for g in of_parameters if g is not None)

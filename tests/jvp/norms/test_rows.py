import dataclasses
import itertools

import pytest
import torch

from fullstride.jvp.norms import naive, rows
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from fullstride.jvp.norms.row_configs import RowConfig
from tests.jvp.norms.cases import Case, reference_dual, reference_gradients, relative_error

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter's
]

ABSENT = [
    frozenset(),
    frozenset({"tx"}),
    frozenset({"tweight", "tbias"}),
    frozenset({"tx", "tweight", "tbias"}),
    frozenset({"bias", "tbias"}),
    frozenset({"weight", "bias", "tweight", "tbias"}),
]
SHAPES = [(5, 7), (3, 11, 48), (2, 3, 130)]
CASES = [Case("layer_norm", (2, 11, 48), absent=a) for a in ABSENT]
CASES += [Case("rms_norm", (2, 11, 48), absent=a) for a in [*ABSENT[:3], ABSENT[5]]]
CASES += [Case("ada_layer_norm", (2, 11, 48), absent=a) for a in ABSENT[:4]]
EVERY = [Case(op, shape) for op in ("layer_norm", "rms_norm", "ada_layer_norm") for shape in SHAPES]
FORMATS = [(case, torch.float32) for case in [*CASES, *EVERY]] + [(case, torch.float16) for case in EVERY[::2]]
formats = pytest.mark.parametrize(("case", "dtype"), FORMATS, ids=str)
# fp32: sums of 130 terms; fp16: the rounding of the result.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3}
SMALL = RowConfig(width=32, rows=4, warps=1, programs=3, stages=2)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill outputs with NaN first, so that unwritten elements show."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


def assert_close(found, expected, dtype):
    for got, want in zip(found, expected, strict=True):
        if got is not None:
            assert relative_error(got, want) < TOLERANCE[got.dtype]
            assert got.dtype == dtype


@formats
def test_forward_agrees_with_fp64(case, dtype, seed):
    inputs = case.draw(seed, dtype)
    y, ty, *moments = inputs.forward(rows, config=SMALL)
    assert (ty is None) == (case.absent >= {"tx", "tweight", "tbias"})
    assert_close((y, ty), reference_dual(inputs.to(torch.float64)), dtype)
    for got, want in zip(moments, inputs.forward(naive)[2:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "dtype", "detached"), [*((*f, False) for f in FORMATS), *((*f, True) for f in FORMATS[::3])], ids=str
)
def test_backward_agrees_with_fp64(case, dtype, detached):
    inputs = case.draw(FORMATS.index((case, dtype)), dtype)
    detached = detached or case.absent >= {"tx", "tweight", "tbias"}
    moments = inputs.forward(naive)[2:]
    found = inputs.backward(rows, moments, detached, config=SMALL)
    present = [g is not None for g in inputs.backward(naive, moments, detached)]
    assert [g is not None for g in found] == present
    assert_close(found, reference_gradients(inputs.to(torch.float64), detached), dtype)
    for got, model in zip(found, (inputs.x, inputs.tx, *inputs.parameters), strict=True):
        assert got is None or got.shape == model.shape


LAUNCHES = [
    RowConfig(width=32, rows=1, warps=1, programs=10**9),
    RowConfig(width=64, rows=2, warps=1, programs=2, stages=1, keep=True),
    RowConfig(width=256, rows=4, warps=4, programs=5, stages=3, keep=True),
]


@pytest.mark.parametrize(
    ("case", "config"), [*itertools.product(EVERY[2::3], LAUNCHES), *zip(CASES[::5], LAUNCHES, strict=True)], ids=str
)
def test_every_way_to_launch(case, config):
    inputs = case.draw(CASES.index(case) if case in CASES else 0, torch.float32)
    exact, detached = inputs.to(torch.float64), case.absent >= {"tx", "tweight", "tbias"}
    y, ty, *moments = inputs.forward(rows, config=config)
    assert_close((y, ty), reference_dual(exact), torch.float32)
    found = inputs.backward(rows, moments, detached, config=config)
    assert_close(found, reference_gradients(exact, detached), torch.float32)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "ada_layer_norm"])
def test_the_tables_own_launch(op):
    """The tables' configurations are right for sizes of one, three and five pieces."""
    for D in (16, 300, 1152):
        inputs = Case(op, (2, 3, D)).draw(D, torch.float32)
        y, ty, *moments = inputs.forward(rows)
        assert_close((y, ty), reference_dual(inputs.to(torch.float64)), torch.float32)
        for detached in (False, True)[: 2 if D == 300 else 1]:
            found = inputs.backward(rows, moments, detached)
            assert_close(found, reference_gradients(inputs.to(torch.float64), detached), torch.float32)


def test_weights_in_fp32_beside_half_precision_activations(seed):
    half = Case("layer_norm", (5, 48)).draw(seed, torch.float16)
    full = half.to(torch.float32)
    mixed = dataclasses.replace(full, x=half.x, tx=half.tx, gy=half.gy, gty=half.gty)
    y, ty, *moments = mixed.forward(rows, config=SMALL)
    assert_close((y, ty), reference_dual(mixed.to(torch.float64)), torch.float16)
    found = mixed.backward(rows, moments, config=SMALL)
    expected = reference_gradients(mixed.to(torch.float64))
    assert_close(found[:2], expected[:2], torch.float16)
    assert_close(found[2:], expected[2:], torch.float32)


def test_parts_of_a_chunk_modulate_without_a_copy(seed):
    inputs = Case("ada_layer_norm", (3, 5, 32)).draw(seed, torch.float32)
    packed = torch.cat([p for p in inputs.parameters if p is not None], 1)
    parts = dict(zip(("weight", "bias", "tweight", "tbias"), packed[:, None].chunk(4, -1), strict=True))
    y, ty, *moments = dataclasses.replace(inputs, **parts).forward(rows, config=SMALL)
    assert_close((y, ty), reference_dual(inputs.to(torch.float64)), torch.float32)
    found = dataclasses.replace(inputs, **parts).backward(rows, moments, config=SMALL)
    expected = reference_gradients(inputs.to(torch.float64))
    assert found[2].shape == (3, 1, 32)
    assert_close([g.squeeze(1) for g in found[2:]], expected[2:], torch.float32)


@pytest.mark.parametrize("op", ["layer_norm", "ada_layer_norm"])
def test_a_mean_a_thousand_times_the_deviation(op, seed):
    """Subtracting the mean cancels digits of x: the error may be 1000 / 1 times the rounding of fp32."""
    inputs = Case(op, (3, 8, 200)).draw(seed, torch.float32)
    inputs = dataclasses.replace(inputs, x=inputs.x + 1000)
    for got, want in zip(inputs.forward(rows)[:2], reference_dual(inputs.to(torch.float64)), strict=True):
        assert relative_error(got, want) < 1e-4


def test_rows_that_do_not_fit_are_refused():
    x = torch.zeros(1, 16385)
    with pytest.raises(ValueError, match="rows of 16385 elements, expected at most 16384"):
        rows.row_norm(ROW_NORMS["layer_norm"], x, None, Affine(), 1e-5)

import math

import pytest
import torch

from fullstride.measure.gate import GateError, relative_error, require_close


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A reference and a direction of its size."""
    g = torch.Generator().manual_seed(seed)
    ref, error = torch.randn(2, 3, 5, 7, generator=g, dtype=torch.float64)
    return ref, error * ref.norm() / error.norm()


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-2, 0.5, 3.0])
def test_the_error_is_relative_to_the_reference(size, seed):
    ref, direction = pair(seed)
    assert relative_error(ref + size * direction, ref) == pytest.approx(size, rel=1e-7, abs=1e-15)
    assert relative_error(1e-20 * (ref + size * direction), 1e-20 * ref) == pytest.approx(size, rel=1e-7, abs=1e-15)


def test_the_error_of_half_precision_is_taken_in_fp64(seed):
    # In bf16 the norm itself would be off by more than the rounding of its elements.
    ref, _ = pair(seed)
    rounded = ref.bfloat16()
    expected = (rounded.double() - ref).norm() / ref.norm()
    assert relative_error(rounded, ref) == pytest.approx(expected.item(), rel=1e-12)
    assert 0 < expected < 2**-8
    # An error of one bf16 step of an element is far below the norm's own bf16 rounding.
    nudged = rounded.clone()
    nudged[0, 0, 0] *= 1 + 2**-7
    expected = (nudged.double() - rounded.double()).norm() / rounded.double().norm()
    assert relative_error(nudged, rounded) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros_like, lambda x: 2 * x, lambda x: -x, lambda x: x / 2, lambda x: x.flip(-1)],
    ids=["zeros", "twice", "negative", "half", "reversed"],
)
def test_what_is_wrong_does_not_pass(wrong, seed):
    ref, _ = pair(seed)
    with pytest.raises(GateError, match=r"^the step: relative error \d.*, expected at most .*; not timed$"):
        require_close("the step", wrong(ref), ref, 1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_never_passes(bad, seed):
    ref, _ = pair(seed)
    out = ref.clone()
    out[1, 2, 3] = bad
    assert relative_error(out, ref) == math.inf
    with pytest.raises(GateError, match="the step: relative error inf"):
        require_close("the step", out, ref, 0.5)
    # Not even where the reference has the same: it proves nothing then.
    with pytest.raises(GateError, match="the step: the reference is empty, zero or not finite"):
        require_close("the step", out, out, 0.5)


def test_what_is_equal_or_within_the_tolerance_passes_with_its_error(seed):
    ref, direction = pair(seed)
    assert require_close("same", ref.clone(), ref, 0.0) == 0.0
    assert require_close("close", ref + 9e-4 * direction, ref, 1e-3) == pytest.approx(9e-4)
    with pytest.raises(GateError, match=r"far: relative error 1\.10e-03"):
        require_close("far", ref + 1.1e-3 * direction, ref, 1e-3)


def test_a_zero_reference_proves_nothing():
    zero, small = torch.zeros(3, 5), torch.full((3, 5), 1e-30)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(small, zero) == math.inf
    with pytest.raises(GateError, match="gradient: the reference is empty, zero"):
        require_close("gradient", zero, zero, 1e-2)
    with pytest.raises(GateError, match="gradient: the reference is empty"):
        require_close("gradient", zero[:0], zero[:0], 1e-2)


@pytest.mark.parametrize("tolerance", [1.0, 2.5, -0.1, math.nan])
def test_a_tolerance_that_zeros_would_pass_is_refused(tolerance, seed):
    ref, _ = pair(seed)
    with pytest.raises(ValueError, match=f"the step: tolerance is {tolerance}, expected 0 <= tolerance < 1"):
        require_close("the step", torch.zeros_like(ref), ref, tolerance)


def test_another_shape_is_no_match():
    # Broadcast, a column against a row would subtract without a word.
    with pytest.raises(GateError, match=r"shape \(3, 1\), the reference \(1, 3\)"):
        relative_error(torch.ones(3, 1), torch.ones(1, 3))
    with pytest.raises(GateError, match=r"the step: shape \(3, 1\), the reference has \(1, 3\); not timed"):
        require_close("the step", torch.ones(3, 1), torch.ones(1, 3), 1e-2)


def test_what_does_not_pass_is_never_called():
    timed = []
    ref, _ = pair(0)

    def run(out: torch.Tensor) -> None:
        require_close("the step", out, ref, 1e-3)
        timed.append(out)

    with pytest.raises(GateError):
        run(torch.zeros_like(ref))
    assert not timed
    run(ref)
    assert len(timed) == 1


def test_a_gate_error_is_a_value_error():
    assert issubclass(GateError, ValueError)

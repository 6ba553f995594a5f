"""The gate in front of every timing: what is wrong is not timed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class GateError(ValueError):
    """A result disagrees with its reference, so its speed means nothing."""


def relative_error(out: "Tensor", reference: "Tensor") -> float:
    """|out - reference| / |reference| in fp64; infinite if anything in `out` is not finite."""
    if out.shape != reference.shape:
        raise GateError(f"the result has shape {tuple(out.shape)}, the reference {tuple(reference.shape)}")
    a, b = out.detach().cpu().double(), reference.detach().cpu().double()
    if not a.isfinite().all():
        return float("inf")
    difference, size = (a - b).norm().item(), b.norm().item()
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def require_close(name: str, out: "Tensor", reference: "Tensor", tolerance: float) -> float:
    """The relative error, if it is within `tolerance`.

    Raises:
        GateError: naming what is off and by how much, or a reference that is zero or not finite and proves nothing.

    """
    if not (reference.isfinite().all() and reference.abs().max() > 0):
        raise GateError(f"{name}: the reference is zero or not finite, so agreeing with it proves nothing")
    error = relative_error(out, reference)
    if not error <= tolerance:
        raise GateError(f"{name}: relative error {error:.2e}, expected at most {tolerance:.0e}; not timed")
    return error

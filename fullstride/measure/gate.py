"""Correctness gate before every timing: a wrong result is not timed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class GateError(ValueError):
    """A result disagrees with its reference, so its speed means nothing."""


def relative_error(out: "Tensor", reference: "Tensor") -> float:
    """|out - reference| / |reference| in fp64; infinite if anything in `out` is not finite.

    Raises:
        GateError: if the shapes differ.

    """
    if out.shape != reference.shape:
        raise GateError(f"the result has shape {tuple(out.shape)}, the reference {tuple(reference.shape)}")
    # The reference's device, unless it is Apple's GPU, which has no fp64.
    place = "cpu" if reference.device.type == "mps" else reference.device
    a, b = (x.detach().to(place).double() for x in (out, reference))
    if not a.isfinite().all():
        return float("inf")
    difference, size = (a - b).norm().item(), b.norm().item()
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def require_close(name: str, out: "Tensor", reference: "Tensor", tolerance: float) -> float:
    """Return the relative error if it is within `tolerance`.

    Raises:
        GateError: naming what is off and by how much, or a reference that is empty, zero or not finite.
        ValueError: for a tolerance that all zeros would pass.

    """
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"{name}: tolerance is {tolerance}, expected 0 <= tolerance < 1 (an all-zero result has error 1)"
        )
    if not (reference.isfinite().all() and reference.any()):
        raise GateError(f"{name}: the reference is empty, zero or not finite: agreeing with it proves nothing")
    if out.shape != reference.shape:
        raise GateError(f"{name}: shape {tuple(out.shape)}, the reference has {tuple(reference.shape)}; not timed")
    error = relative_error(out, reference)
    if not error <= tolerance:
        raise GateError(f"{name}: relative error {error:.2e}, expected at most {tolerance:.2g}; not timed")
    return error

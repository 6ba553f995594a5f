"""The gate in front of every timing: all ways of calling a step must train alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullstride.measure.gate import GateError

STEPS = 3


def difference(arrays: Sequence[Any], reference: Sequence[Any], start: Sequence[Any]) -> float:
    """|arrays - reference| over |reference - start|, in fp64: how much of the training differs."""
    pairs = [(np.asarray(a, "d") - np.asarray(r, "d")).ravel() for a, r in zip(arrays, reference, strict=True)]
    moved = [(np.asarray(r, "d") - np.asarray(s, "d")).ravel() for r, s in zip(reference, start, strict=True)]
    return float(np.linalg.norm(np.concatenate(pairs)) / np.linalg.norm(np.concatenate(moved)))


def require_alike(
    name: str, arrays: Sequence[Any], reference: Sequence[Any], start: Sequence[Any], tolerance: float
) -> float:
    """The difference of a way's parameters after some steps, if it is within `tolerance`.

    Raises:
        GateError: if it is not.

    """
    error = difference(arrays, reference, start)
    if not error <= tolerance:
        raise GateError(
            f"{name}: after {STEPS} steps {error:.2e} of the training differs, expected at most {tolerance:.2g}; "
            "not timed"
        )
    return error

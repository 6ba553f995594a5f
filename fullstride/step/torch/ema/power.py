"""Averages by power functions, and averages of any length out of stored ones afterwards (EDM2, arXiv:2312.02696).

At step t such an average weighs the weights of step s by p(s) = (g + 1) s^g / t^(g + 1): its length is a share of the
training so far, and its beginning fades by itself. Section 3.1 and appendix C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WIDEST = 12**-0.5  # of the plain mean of all steps, g = 0


@dataclass(frozen=True)
class Power:
    """A power-function average, named by its relative width: the standard deviation of p over t."""

    width: float

    def __post_init__(self) -> None:
        """Check the width.

        Raises:
            ValueError: if no power function of a positive exponent has it.

        """
        if not 0 < self.width < WIDEST:
            raise ValueError(f"width is {self.width}, expected a number above 0 and below {WIDEST:.4f}, such as 0.05")

    @cached_property
    def exponent(self) -> float:
        """The exponent g, the largest root of (g + 1) = width^2 (g + 2)^2 (g + 3) (equation 123)."""
        inverse = self.width**-2
        return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())

    def __repr__(self) -> str:
        """`power_0.05`, with every digit."""
        return f"power_{self.width!r}"


Stored = tuple[float, Power]  # an average at a step


def overlap(a: Stored, b: Stored) -> float:
    """The integral of two profiles' product over the training (equation 150)."""
    (first, g), (second, h) = sorted(((step, power.exponent) for step, power in (a, b)), reverse=True)
    # With `first` the later step: p_a p_b is nothing beyond `second`.
    return (g + 1) * (h + 1) * (second / first) ** g / ((g + h + 1) * first)


def combination(stored: Sequence[Stored], wanted: Stored) -> tuple[np.ndarray, float]:
    """Factors of stored averages whose sum has the profile nearest to a wanted one, and its relative distance.

    The factors add up to 1, which the paper's need not: weights are large beside their changes, and a sum of 0.997
    would shrink all of them.

    Args:
        stored: averages by their step and power.
        wanted: the step and the power of the average to have.

    Returns:
        Factors, in fp64, and the root of (the squared difference of the profiles over the wanted one's square).

    """
    products = np.array([[overlap(a, b) for b in stored] for a in stored])
    right = np.array([overlap(a, wanted) for a in stored])
    ones = np.ones(len(stored))
    system = np.block([[products, ones[:, None]], [ones, np.zeros(1)]])  # of Lagrange's function
    factors = np.linalg.lstsq(system, np.append(right, 1.0), rcond=None)[0][:-1]
    square = overlap(wanted, wanted)
    distance = square - 2 * factors @ right + factors @ products @ factors
    return factors, float(max(distance, 0.0) / square) ** 0.5

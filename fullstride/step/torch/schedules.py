"""Learning rates as factors of the first: functions of how many steps were made, on the device in a captured step."""

import math
from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

Schedule = Callable[[Int[Tensor, ""]], Float[Tensor, ""]]


def constant(made: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the factor 1 at every step."""
    return made.double() * 0 + 1


def cosine(total: int) -> Schedule:
    """Half a cosine from 1 to 0 in `total` steps (arXiv:1608.03983, equation 5 without restarts); 0 from then on."""
    return lambda made: 0.5 + 0.5 * (made.double() * (math.pi / total)).clamp(max=math.pi).cos()


def cosine_of(share: Float[Tensor, ""]) -> Schedule:
    """Half a cosine from 1 to 0 over a budget that is no number of steps, as of time (arXiv:1905.04753).

    Args:
        share: of the budget that is used up, 0 to 1, on the device; written before a step by who counts it.

    """
    return lambda made: 0.5 + 0.5 * (made.double() * 0 + share * math.pi).cos()


def warmed_up(schedule: Schedule, steps: int) -> Schedule:
    """`schedule`, times a line from 1 / steps to 1 in the first `steps` steps (arXiv:1706.02677, section 2.2)."""
    return lambda made: schedule(made) * ((made.double() + 1) / max(1, steps)).clamp(max=1)

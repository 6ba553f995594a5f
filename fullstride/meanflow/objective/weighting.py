"""How a loss weighs the errors of its samples, and the adaptive weight of MeanFlow."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.config.objectives import WEIGHTINGS
from fullstride.settings.fields import Conflict
from fullstride.settings.overrides import load_object


@dataclass(frozen=True)
class Weighting:
    """A weight of each sample, without gradient.

    Attributes:
        weigh: function of the samples' summed squared errors (b,), times t and r (b,), a power and a constant.
        least_batch: smallest number of samples of a pass.
        conflicts: settings that exclude each other with it.

    """

    weigh: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
    least_batch: int = 1
    conflicts: tuple[Conflict, ...] = ()


def weighting_of(name: str) -> Weighting:
    """The weighting of a name of `WEIGHTINGS`."""
    return load_object(WEIGHTINGS[name], "loss.weighting")


def adaptive_weight(squared_error: Float[Tensor, " b"], power: float, c: float = 1e-3) -> Float[Tensor, " b"]:
    """w = 1 / (||error||^2 + c)^p with stop-gradient (arXiv:2505.13447, section 4.3 "Loss metrics").

    Args:
        squared_error: a sample's squared error **summed** over its elements: the scale of `c` depends on it.
        power: p; 0 is plain squared error, 0.5 the pseudo-Huber loss, 1 the paper's ImageNet setting.
        c: keeps the weight finite as the error goes to 0.

    Raises:
        ValueError: if `power` is negative or `c` not positive.

    """
    if power < 0 or c <= 0:
        raise ValueError(
            f"weighting_power is {power} and weighting_eps {c}; expected power >= 0 and eps > 0 "
            "(0.75 and 1e-3 are CIFAR-10's, 1 and 1e-2 ImageNet's)"
        )
    return (squared_error.detach() + c).pow(-power)


ADAPTIVE = Weighting(lambda error, t, r, power, c: adaptive_weight(error, power, c))

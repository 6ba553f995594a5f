"""What of du/dt enters the target: all of it, or less at the start of a run, or up to a limit.

The target v - (t - r) du/dt holds a derivative of the network that is being trained. Early in a run that derivative is
arbitrary, and later one sample's may be far larger than any velocity; either can make a run diverge.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.objective.shapes import over_elements
from fullstride.settings.fields import NotNegative, Share, check


@dataclass(frozen=True)
class TangentControl:
    """Factor of du/dt in the target.

    Attributes:
        warmup: share of the run over which the factor rises linearly from 0 to 1, as in arXiv:2410.11081, section 4;
            at 0 the target is v itself: flow matching for each r.
        limit: largest root mean square, over a sample's elements, of (t - r) du/dt, which is scaled down to it; 0 is no
            limit. At the fixed point that is u - v, so a limit above the root mean square of u - v leaves it there.

    """

    warmup: Share = 0.0
    limit: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: for one out of its range.

        """
        check(self)

    def __call__(
        self, dudt: Float[Tensor, "b *s"], gap: Float[Tensor, " b"], progress: Float[Tensor, " b"] | None
    ) -> Float[Tensor, "b *s"]:
        """du/dt as it enters the target.

        Args:
            dudt: the derivative.
            gap: t - r of each sample.
            progress: share of the run that is done, in [0, 1], for each sample.

        Raises:
            ValueError: for a warm-up without progress.

        """
        if self.limit > 0:
            size = gap * dudt.reshape(len(dudt), -1).float().square().mean(1).sqrt().to(gap.dtype)
            # No division by a size of 0, and none by one that is not finite: the guard is to see it.
            dudt = over_elements(self.limit / size.clamp_min(self.limit), dudt) * dudt
        if self.warmup > 0:
            if progress is None:
                raise ValueError("warmup without progress, expected the share of the run that is done for each sample")
            dudt = over_elements((progress / self.warmup).clamp(0, 1).to(dudt.dtype), dudt) * dudt
        return dudt

"""`loss.weighting=huber`: a sample is weighted by its own error or, if larger, by the expected error at its times."""

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.objective.weighting import Weighting, adaptive_weight
from fullstride.settings.fields import Conflict

Samples = Float[Tensor, " b"]  # a number for each
# How near two samples' times are to tell of each other's error: of log(t / (1 - t)), as far as the error of a velocity
# keeps its size, and of (t - r) / t, which is 0 where r = t and near 1 where r is near 0.
OF_TIME, OF_STEP = 0.5, 0.2
ENDS = 1e-4  # t is taken to be no nearer to 0 or 1, where its logit is infinite


def expected_error(squared_error: Samples, t: Samples, r: Samples) -> Samples:
    """E[||error||^2 | t, r] by kernel regression over the other samples of the batch, without gradient.

    A Gaussian kernel in log(t / (1 - t)) and (t - r) / t (Nadaraya, Theory Probab. Appl. 9, 1964, 141; Watson, Sankhya
    A 26, 1964, 359). A sample's own error is left out, so that given its times the result is independent of it; where
    none has times like its own, the nearest count. The batch is what one pass sees: each process's, and each part's of
    an accumulated one.

    Raises:
        ValueError: if the batch holds no other sample.

    """
    if len(squared_error) < 2:
        raise ValueError(
            "weighting=huber with a batch of 1, expected at least 2 samples in a pass, since the other samples give "
            "the expected error; use a larger batch or fewer parts of it, or weighting=adaptive"
        )
    time = torch.logit(t.detach().float(), ENDS) / OF_TIME
    step = (t - r).detach().float() / t.detach().float().clamp_min(ENDS) / OF_STEP
    apart = (time[:, None] - time).square() + (step[:, None] - step).square()
    own = torch.eye(len(t), dtype=torch.bool, device=t.device)
    shares = torch.softmax((-apart / 2).masked_fill(own, -torch.inf), dim=1)
    # No matrix product: autocast would round it.
    return (shares.to(squared_error.dtype) * squared_error.detach()).sum(1)


def huber_weight(squared_error: Samples, t: Samples, r: Samples, power: float, c: float = 1e-3) -> Samples:
    """w = 1 / (max(||error||^2, E[||error||^2 | t, r]) + c)^p with stop-gradient.

    A sample whose error is below the expected error at its times is weighted like all of them; only one above it counts
    less: as a function of the sample a Huber loss (Ann. Math. Stat. 35, 1964, 73) with a threshold for each (t, r),
    quadratic below it and ||error||^(2 - 2p) above. `adaptive_weight` has its threshold at c, far below any error of a
    velocity: it goes after the samples that are easy, dark ones among pictures, which makes the velocity another than
    the mean.

    Args:
        squared_error: as in `adaptive_weight`.
        t: the samples' times.
        r: at most t.
        power: p; 0 is plain squared error.
        c: as in `adaptive_weight`.

    Raises:
        ValueError: as `adaptive_weight` and `expected_error`.

    """
    return adaptive_weight(torch.maximum(squared_error.detach(), expected_error(squared_error, t, r)), power, c)


HUBER = Weighting(
    huber_weight,
    least_batch=2,
    conflicts=(
        Conflict(
            "loss.weighting loss.weighting_power",
            lambda c: c.loss.weighting_power == 0,
            "a power above 0, such as 0.75: at 0 every weight is 1; or leave loss.weighting out",
        ),
        Conflict(
            "loss.weighting data.batch_size",
            lambda c: c.data.batch_size < 2,
            "at least 2 samples, since the other samples give the expected error; or loss.weighting=adaptive",
        ),
    ),
)

"""Kernel distance between two sets of features: KID's estimator, on any features."""

from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.metrics.rows import BLOCK, as_rows


def _kernel_sum(x: Tensor, y: Tensor) -> float:
    """The sum of (x_i . y_j / d + 1)^3 over all pairs."""
    total = x.new_zeros(())
    for a in x.split(BLOCK):
        for b in y.split(BLOCK):
            total += (a @ b.T / x.shape[1] + 1).pow(3).sum()
    return total.item()


def kernel_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"]) -> float:
    """The unbiased squared maximum mean discrepancy under the cubic kernel (arXiv:1801.01401, section 4), in fp64.

    Its expectation is 0 for equal distributions whatever the counts, and values may lie below. The paper averages it
    over subsets; over all pairs it estimates the same number with less variance.

    Raises:
        ValueError: for fewer than 2 samples, different numbers of features, or features that are not finite.

    """
    x, y = as_rows(x, y)
    n, m = len(x), len(y)
    own_x, own_y = ((z.square().sum(1) / z.shape[1] + 1).pow(3).sum().item() for z in (x, y))
    within_x = (_kernel_sum(x, x) - own_x) / (n * (n - 1))
    within_y = (_kernel_sum(y, y) - own_y) / (m * (m - 1))
    return within_x + within_y - 2 * _kernel_sum(x, y) / (n * m)

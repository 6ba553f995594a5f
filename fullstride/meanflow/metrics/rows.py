"""Two sets of features: what they must be to be compared, and their rows in fp64 for the metrics of pairs."""

from jaxtyping import Float, Float64
from torch import Tensor

# Rows of one block of pairs: 32 MiB of fp64 each.
BLOCK = 2048


def check_pair(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"], *, least: int = 2) -> None:
    """Check that two sets of features can be compared.

    Raises:
        ValueError: for fewer than `least` samples, different numbers of features, or features that are not finite.

    """
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}, expected the same")
    for name, sample in (("x", x), ("y", y)):
        if len(sample) < least:
            raise ValueError(f"{name} has {len(sample)} samples, expected at least {least}")
        if not sample.isfinite().all():
            raise ValueError(f"{name} holds features that are not finite; check the images they were made from")


def as_rows(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m e"], *, least: int = 2
) -> tuple[Float64[Tensor, "n d"], Float64[Tensor, "m e"]]:
    """Both sets, checked, in fp64 on their device (the CPU for MPS, which has no fp64)."""
    check_pair(x, y, least=least)
    x, y = (s.cpu() if s.device.type == "mps" else s for s in (x, y))
    return x.double(), y.double()

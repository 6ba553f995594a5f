"""Pictures as the feature networks of others want them: three channels of whole levels, 0 to 255."""

from jaxtyping import Float
from torch import Tensor


def byte_levels(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
    """The levels of RGB bytes, as fp32 on the images' device; grey is repeated.

    Real pictures were bytes once and generated ones were not: rounding both alike leaves no difference to find.

    Args:
        images: values in [-1, 1], clamped; 1 or 3 channels.

    Raises:
        ValueError: for another number of channels, or pixels that are not finite.

    """
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images have {images.shape[1]} channels, expected 1 (grey) or 3 (RGB)")
    if bad := int((~images.isfinite()).flatten(1).any(1).sum()):
        raise ValueError(f"{bad} of {len(images)} images are not finite; the sampler or the network diverged")
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().expand(-1, 3, -1, -1)

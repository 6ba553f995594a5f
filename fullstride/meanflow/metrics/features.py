"""Features of images, by name, on which distances between sets of images are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.device.precision import exact_fp32
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.schema import FEATURES
from fullstride.meanflow.metrics import classifier as small
from fullstride.meanflow.metrics import inception
from fullstride.meanflow.metrics.efficientnet import load_efficientnet
from fullstride.meanflow.metrics.weights import weights_sha256
from fullstride.runs.atomic_files import file_sha256


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


@dataclass(frozen=True)
class Features:
    """Extractor of features: one function of images, applied batch by batch on one device.

    Attributes:
        name: one of `FEATURES`.
        label: name of a Frechet distance on these features, for tables; `FID` is the official network's alone.
        dim: number of features per image.
        identity: identifier of weights and preprocessing; only features of one identity are comparable.
        compute: the function of images.
        batch: images per call.
        device: the device that computes.

    """

    name: str
    label: str
    dim: int
    identity: str
    compute: Callable[[Tensor], Tensor]
    batch: int
    device: torch.device

    def __call__(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """The features of images in [-1, 1] on any device, in fp32 on the extractor's."""
        with torch.no_grad(), exact_fp32(self.device):
            parts = [self.compute(part.to(self.device).float()) for part in images.split(self.batch)]
        return torch.cat(parts)


def build_features(
    name: str,
    device: torch.device,
    *,
    classifier: small.FeatureClassifier | None = None,
    weights: Path | None = None,
) -> Features:
    """The extractor of that name.

    `classifier` gives the 64 features of one trained on the training half, `FD-classifier`; `efficientnet_lite0` the
    1,280 of EfficientNet-Lite0 on ImageNet, `FD-EffNetLite0`; `inception` the 2,048 of Inception, `FID` with the
    official weights, `FD-Inception-...` with others.

    Args:
        name: one of `FEATURES`.
        device: the device that computes.
        classifier: a trained classifier, for `classifier`.
        weights: the file of weights, for the others.

    Raises:
        ConfigError: for an unknown name, weights that are missing or do not fit, or without torch-fidelity.
        ValueError: if `classifier` is missing.

    """
    one_of("features", name, FEATURES)
    if name == "classifier":
        if classifier is None:
            raise ValueError("features=classifier needs a trained classifier, but none was given")
        model = classifier.to(device)
        identity = f"classifier clamped {weights_sha256(model.state_dict())}"
        compute = lambda images: model.features(images.clamp(-1, 1))  # noqa: E731
        return Features(name, "FD-classifier", small.FEATURES, identity, compute, small.BATCH, device)
    if weights is None:
        raise ConfigError(f"features={name}: no file of weights given, expected its path")
    model = (inception.load_inception if name == "inception" else load_efficientnet)(weights).to(device)
    compute = lambda images: model.features(byte_levels(images))  # noqa: E731
    found = file_sha256(weights)
    # On a CPU the activations of a few large pictures fill its caches; there more at once are slower.
    batch = 4 if device.type == "cpu" else 128
    if name == "inception":
        label = "FID" if found == inception.OFFICIAL_SHA256 else f"FD-Inception-{found[:8]}"
        return Features(name, label, 2048, f"inception torch-fidelity bytes {found}", compute, batch, device)
    identity = f"efficientnet_lite0 bytes bicubic-antialias-224 (x-127)/128 {found}"
    return Features(name, "FD-EffNetLite0", 1280, identity, compute, batch, device)

"""Features of images, by name: what the distances between sets of images are measured on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.device.precision import ieee
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.metrics import classifier as small
from fullstride.meanflow.metrics import inception
from fullstride.meanflow.metrics.bytes import byte_levels
from fullstride.meanflow.metrics.efficientnet import load_efficientnet
from fullstride.meanflow.metrics.weights import weights_sha256
from fullstride.runs.atomic_files import file_sha256


@dataclass(frozen=True)
class Features:
    """Extractor of features: one function of images, applied batch by batch on one device.

    Attributes:
        name: one of `FEATURES`.
        label: of a Frechet distance on these features, for tables; `FID` is the official network's alone.
        dim: features an image.
        identity: of weights and preprocessing; features of one identity compare.
        compute: the function.
        batch: images at a time.
        device: where it computes.

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
        with torch.no_grad(), ieee(self.device):
            parts = [self.compute(part.to(self.device).float()) for part in images.split(self.batch)]
        return torch.cat(parts)


def _batch(device: torch.device) -> int:
    """On a CPU the activations of a few large pictures fill its caches; there more at once are slower."""
    return 4 if device.type == "cpu" else 128


def classifier_features(model: small.FeatureClassifier, device: torch.device) -> Features:
    """The 64 features of a classifier trained on the training half, `FD-classifier`."""
    model = model.to(device)
    identity = f"classifier clamped {weights_sha256(model.state_dict())}"

    def compute(images: Tensor) -> Tensor:
        return model.features(images.clamp(-1, 1))

    return Features("classifier", "FD-classifier", small.FEATURES, identity, compute, small.BATCH, device)


def efficientnet_features(weights: Path, device: torch.device) -> Features:
    """The 1,280 features of EfficientNet-Lite0 on ImageNet, `FD-EffNetLite0`.

    Raises:
        ConfigError: if `weights` is not its file.

    """
    model = load_efficientnet(weights).to(device)
    identity = f"efficientnet_lite0 bytes bicubic-antialias-224 (x-127)/128 {file_sha256(weights)}"

    def compute(images: Tensor) -> Tensor:
        return model.features(byte_levels(images))

    return Features("efficientnet_lite0", "FD-EffNetLite0", 1280, identity, compute, _batch(device), device)


def inception_features(weights: Path, device: torch.device) -> Features:
    """The 2,048 features of Inception: `FID` with the official weights, `FD-Inception-...` with others.

    Raises:
        ConfigError: if torch-fidelity cannot be imported, or `weights` is not a file of its format.

    """
    model = inception.load_inception(weights).to(device)
    found = file_sha256(weights)
    label = "FID" if found == inception.OFFICIAL_SHA256 else f"FD-Inception-{found[:8]}"

    def compute(images: Tensor) -> Tensor:
        return model.features(byte_levels(images))

    return Features(
        "inception", label, 2048, f"inception torch-fidelity bytes {found}", compute, _batch(device), device
    )


FEATURES = {
    "classifier": classifier_features,
    "efficientnet_lite0": efficientnet_features,
    "inception": inception_features,
}


def build_features(
    name: str,
    device: torch.device,
    *,
    classifier: small.FeatureClassifier | None = None,
    weights: Path | None = None,
) -> Features:
    """The extractor of that name.

    Args:
        name: one of `FEATURES`.
        device: where it computes.
        classifier: a trained classifier, for `classifier`.
        weights: the file of weights, for the others.

    Raises:
        ConfigError: for an unknown name, or weights that are missing or do not fit.
        ValueError: if `classifier` is missing.

    """
    one_of("features", name, FEATURES)
    if name == "classifier":
        if classifier is None:
            raise ValueError("features=classifier needs a trained classifier, there is none")
        return classifier_features(classifier, device)
    if weights is None:
        raise ConfigError(f"features={name}: no file of weights is given, expected its path")
    return FEATURES[name](weights, device)

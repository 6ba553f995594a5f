"""Inception's 2,048 pooled features, through torch-fidelity: what an FID is made of (arXiv:1706.08500)."""

import importlib
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.metrics.weights import first_line, read_weights
from fullstride.settings.fields import Conflict

CONFLICTS = (
    Conflict(
        "evaluation.features",
        lambda c: "inception" in c.evaluation.features and not c.evaluation.inception_weights,
        "evaluation.inception_weights=FILE as well, the weights that torch-fidelity downloads",
    ),
)

FILE = "weights-inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{FILE}"
# TensorFlow's network of 2015-12-05, the one every published FID uses.
OFFICIAL_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Inception(nn.Module):
    """torch-fidelity's network, whose resizing and pooling are those of the original TensorFlow graph."""

    def __init__(self, network: nn.Module):
        """Wrap a network that returns a tuple of one tensor of features."""
        super().__init__()
        self.network = network

    def features(self, levels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 2048"]:
        """The pooled features of pictures whose levels are whole numbers from 0 to 255, of any size."""
        return self.network(levels.to(torch.uint8))[0]


def load_inception(path: Path) -> Inception:
    """The network with weights in torch-fidelity's format; the file is read as tensors, never run as a pickle.

    No random number of the process is drawn: a run may load it between two steps.

    Raises:
        ConfigError: if torch-fidelity cannot be imported, or the file is missing or holds other weights.

    """
    expected = f"{FILE}; download {URL}"
    read_weights(path, expected)  # torch-fidelity unpickles what a file holds: only tensors may pass
    try:
        extractor = importlib.import_module("torch_fidelity").FeatureExtractorInceptionV3
    # A torchvision built for another torch fails in many ways, RuntimeError among them.
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"features=inception needs torch-fidelity, and its import failed ({first_line(error)}); pip install "
            "torch-fidelity, with a torchvision that matches the installed torch"
        ) from None
    try:
        with torch.random.fork_rng(devices=[]):
            network = extractor("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
    except RuntimeError as error:
        raise ConfigError(f"{path}: not the network's tensors ({first_line(error)}); expected {expected}") from None
    return Inception(network)

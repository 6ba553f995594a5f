"""A small classifier trained on the spot, whose features stand in for Inception's where those do not fit."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride.device.precision import exact_fp32, unsearched_convolutions

FEATURES = 64
BATCH = 512
MIN_SIZE = 8


class FeatureClassifier(nn.Module):
    """Three convolutions, a pooled grid of 4x4, 64 features, one linear layer of logits.

    No batch statistics and no dropout: an image's features do not depend on its batch.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 32):
        """Make the network for images of at least 8x8."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * width, FEATURES),
            nn.SiLU(),
        )
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n k"]:
        """Logits."""
        return self.head(self.body(x))

    def maps(self, x: Float[Tensor, "n c h w"]) -> list[Float[Tensor, "n _ _ _"]]:
        """The maps behind each convolution, differentiable."""
        found = []
        for layer in [*self.body.children()][:6]:
            x = layer(x)
            if isinstance(layer, nn.SiLU):
                found.append(x)
        return found

    @torch.no_grad()
    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 64"]:
        """The 64 features before the logits."""
        return torch.cat([self.body(part) for part in x.split(BATCH)])

    @torch.no_grad()
    def predict(self, x: Float[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
        """The likeliest class of each image."""
        return torch.cat([self(part).argmax(1) for part in x.split(BATCH)])


def accuracy(model: FeatureClassifier, images: Float[Tensor, "n c h w"], labels: Int[Tensor, " m"]) -> float:
    """The share of images, from 0 to 1, whose likeliest class is their label.

    Raises:
        ValueError: if there are no images, or not as many labels.

    """
    _check_pairs(images, labels)
    return (model.predict(images) == labels.to(images.device)).double().mean().item()


def _check_pairs(images: Tensor, labels: Tensor) -> None:
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels, expected as many of each")
    if not len(images):
        raise ValueError("there are no images, expected at least one")


def train_classifier(
    images: Float[Tensor, "n c h w"],
    labels: Int[Tensor, " m"],
    *,
    num_classes: int,
    seed: int = 0,
    epochs: int = 30,
    device: torch.device | str = "cpu",
) -> FeatureClassifier:
    """Train a classifier, the same for the same seed, without touching the global random state.

    The same bit for bit on machines of one kind with the same libraries, on CPUs with as many threads, whatever
    precision the process trains in, so that runs made at different times and places are measured alike. On a GPU the
    sides of the images must be multiples of 8 for that: of others, pooling's backward pass adds in no fixed order.

    Args:
        images: values in [-1, 1], at least 8x8.
        labels: 0 to num_classes - 1.
        num_classes: number of classes.
        seed: seed of the weights and the order.
        epochs: passes over the images, in batches of 64 under a one-cycle learning rate.
        device: where to train; the network stays there.

    Raises:
        ValueError: if there are no images, not as many labels, images below 8x8, or a label that has no class.

    """
    _check_pairs(images, labels)
    if min(images.shape[2:]) < MIN_SIZE:
        height, width = images.shape[2:]
        raise ValueError(f"images are {height}x{width}, expected at least {MIN_SIZE}x{MIN_SIZE}; enlarge them first")
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}, expected 0 to {num_classes - 1}")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would reseed every CUDA device's generator too, which nothing here restores.
        torch.default_generator.manual_seed(seed)
        model = FeatureClassifier(images.shape[1], num_classes)
    generator = torch.Generator().manual_seed(seed)
    model, images, labels = model.to(device), images.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    batches = [torch.randperm(len(images), generator=generator).split(64) for _ in range(epochs)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=sum(map(len, batches)))
    with exact_fp32(images.device), unsearched_convolutions():
        for chosen in (b.to(device) for epoch in batches for b in epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(False)

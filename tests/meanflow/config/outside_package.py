"""The source of a package that knows fullstride, and that fullstride does not know."""

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, image_size, num_classes=0, *, width: int = 8, depths: list[int] = (1,), act=None):
        super().__init__()
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.first, self.last = nn.Conv2d(channels + 2, width, 3, padding=1), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, z, r, t, label=None):
        times = torch.stack([r, t], 1)[:, :, None, None].expand(-1, -1, *z.shape[2:])
        h = self.first(torch.cat([z, times], 1))
        if label is not None and self.label is not None:
            h = h + self.label(label)[:, :, None, None]
        return self.last(torch.tanh(h))

class Normed(Net):
    def forward(self, z, r, t, label=None):
        return nn.functional.group_norm(super().forward(z, r, t, label), 1) + z

class Alien(nn.Module):
    def __init__(self, config):
        super().__init__()

def function(channels, image_size, num_classes=0):
    return Net(channels, image_size)
"""
LOSSES = """
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fullstride.meanflow.objective.loss import CONFLICTS, MeanFlowLoss
from fullstride.settings.fields import Conflict
from fullstride.settings.fields import Share

@dataclass(frozen=True)
class Halved(MeanFlowLoss):
    share: Share = 0.5

    conflicts: ClassVar = (*CONFLICTS, Conflict("loss.share epochs", lambda c: c.epochs == 7, "other epochs"))

    def at(self, *args, **kwargs):
        loss, metrics = super().at(*args, **kwargs)
        return self.share * loss, metrics
"""
DATA = """
from pathlib import Path

import torch
from fullstride.meanflow.data.dataset import Dataset, Split

def dots(path: Path | None) -> Dataset:
    records = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    records[torch.arange(64), 0, torch.arange(64) % 8, torch.arange(64) // 8] = 255
    train, test = (Split(part, torch.arange(32) % 2) for part in records.split(32))
    return Dataset("dots", train, test, 2, (1, 8, 8), f"dots of {path}")

def unmarked(path):
    raise AssertionError("called")
"""


def write(folder) -> None:
    """Make the package `strangers` in a folder."""
    package = folder / "strangers"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "nets": NETS, "losses": LOSSES, "data": DATA, "broken": "1 / 0"}.items():
        (package / f"{name}.py").write_text(text)

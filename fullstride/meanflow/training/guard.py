"""The guard of a training run: it skips or softens steps that would harm it, without waiting for the device."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fullstride.meanflow.config.schema import GuardConfig
from fullstride.step.torch import HostCopy

# Gradient norms before that many accepted steps say little about later ones.
SETTLED = 100
AVERAGED = 100  # steps that the running average of the norm remembers


class GuardCounts(NamedTuple):
    """Steps of a run so far that were not taken as they were; of those `skipped`, `lost` had no finite loss."""

    skipped: int = 0
    spikes: int = 0
    lost: int = 0


class Guard:
    """Judges every step by its loss and gradient norm, on the device.

    A step is skipped if either is not finite. A gradient whose norm exceeds `spike` running averages is scaled to one
    average, as in ZClip (arXiv:2504.02507) and AdaGC (arXiv:2502.11034): skipped, it would leave the weights where
    such gradients come from, and the next ones would be as long. Spikes do not enter the average.
    The host learns of skips one step late, so it never waits for the step that it has just launched.

    Attributes:
        tensors: the guard's memory, part of a checkpoint: the running average of the norm, accepted steps, spikes,
            skipped steps in all and in a row, and those whose loss was not finite.

    """

    def __init__(self, config: GuardConfig, device: torch.device):
        """Start without any history."""
        self.config = config
        counts = ("accepted", "spikes", "skipped", "skipped_in_a_row", "lost")
        self.tensors = {"mean_norm": torch.zeros((), device=device)}
        self.tensors |= {name: torch.zeros((), device=device, dtype=torch.int64) for name in counts}
        self._skips = HostCopy(self.tensors["skipped_in_a_row"])

    @torch.no_grad()
    def judge(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> tuple[Bool[Tensor, ""], Float[Tensor, ""]]:
        """Decide whether the step is skipped, and by which number its gradient is divided."""
        memory = self.tensors
        harmful = ~(loss.isfinite() & norm.isfinite())
        spike = torch.zeros_like(harmful)
        if self.config.spike > 0:
            spike = (memory["accepted"] >= SETTLED) & (norm > self.config.spike * memory["mean_norm"]) & ~harmful
        shrink = torch.where(spike, norm.float() / memory["mean_norm"], 1.0)
        ordinary = ~(harmful | spike)
        weight = ordinary / (memory["accepted"] + 1).clamp(max=AVERAGED)
        step = torch.where(ordinary, norm.float() - memory["mean_norm"], 0.0)
        memory["mean_norm"] += weight * step
        memory["accepted"] += ordinary
        memory["spikes"] += spike
        memory["skipped"] += harmful
        memory["lost"] += ~loss.isfinite()
        memory["skipped_in_a_row"].copy_(torch.where(harmful, memory["skipped_in_a_row"] + 1, 0))
        return harmful, shrink

    def judged(self) -> GuardCounts:
        """Counts so far; waits for the device."""
        return GuardCounts(*(int(self.tensors[name]) for name in GuardCounts._fields))

    def exhausted(self) -> bool:
        """Return whether too many consecutive steps had been skipped as of the step before last."""
        before = int(self._skips.arrived())
        self._skips = HostCopy(self.tensors["skipped_in_a_row"])
        return before >= self.config.max_skips

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Return to the memory of a checkpoint."""
        for name, value in tensors.items():
            self.tensors[name].copy_(value)
        self._skips = HostCopy(self.tensors["skipped_in_a_row"])

    def forget_skips(self) -> None:
        """Start counting anew, after a checkpoint was restored."""
        self.load(self.tensors | {"skipped_in_a_row": torch.zeros((), dtype=torch.int64)})

"""The guard of a training run: it skips steps that would harm the weights, without waiting for the device."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fullstride.meanflow.config import GuardConfig

# Gradient norms before that many accepted steps say little about later ones.
SETTLED = 100
AVERAGED = 100  # steps that the running average of the norm remembers


class Guard:
    """Judges every step by its loss and gradient norm, on the device.

    A step is skipped if either is not finite, or if the norm exceeds `spike` running averages of accepted steps'.
    The host learns of it one step late, so it never waits for the step that it has just launched.

    Attributes:
        tensors: the guard's memory, part of a checkpoint: the running average of the norm, accepted steps, skipped
            steps in all and in a row.

    """

    def __init__(self, config: GuardConfig, device: torch.device):
        """Start without any experience."""
        self.config, self.device = config, device
        self.tensors = {
            "mean_norm": torch.zeros((), device=device),
            "accepted": torch.zeros((), device=device, dtype=torch.int64),
            "skipped": torch.zeros((), device=device, dtype=torch.int64),
            "skipped_in_a_row": torch.zeros((), device=device, dtype=torch.int64),
        }
        self._copy = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def judge(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Bool[Tensor, ""]:
        """Whether the step is to be skipped."""
        memory, spike = self.tensors, self.config.spike
        harmful = ~(loss.isfinite() & norm.isfinite())
        if spike > 0:
            harmful |= (memory["accepted"] >= SETTLED) & (norm > spike * memory["mean_norm"])
        weight = 1 / (memory["accepted"] + 1).clamp(max=AVERAGED)
        mean = memory["mean_norm"] + weight * (norm.float() - memory["mean_norm"])
        memory["mean_norm"].copy_(torch.where(harmful, memory["mean_norm"], mean))
        memory["accepted"] += ~harmful
        memory["skipped"] += harmful
        memory["skipped_in_a_row"].copy_(torch.where(harmful, memory["skipped_in_a_row"] + 1, 0))
        return harmful

    def exhausted(self) -> bool:
        """Whether too many steps in a row had been skipped when the last but one step was made."""
        if self._copied is not None:
            self._copied.synchronize()
        before = int(self._copy)
        self._copy.copy_(self.tensors["skipped_in_a_row"], non_blocking=True)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return before >= self.config.max_skips

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Return to the memory of a checkpoint."""
        for name, value in tensors.items():
            self.tensors[name].copy_(value)
        self._copied = None
        self._copy.copy_(tensors["skipped_in_a_row"])

    def forget_skips(self) -> None:
        """Start counting anew, after a checkpoint was restored."""
        self.load(self.tensors | {"skipped_in_a_row": torch.zeros((), dtype=torch.int64)})

"""One optimizer step: forward, derivative, backward, clipping, guard, AdamW, averages. Nothing waits for the device."""

import math

import torch
from torch import Tensor

from fullstride.meanflow.config import OptimizerConfig, TrainConfig
from fullstride.meanflow.data.inputs import Inputs
from fullstride.meanflow.objective import MeanFlowLoss
from fullstride.meanflow.state import RunState
from fullstride.precision import autocast


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    decay = 0.5 + 0.5 * math.cos(math.pi * step / total) if config.decay == "cosine" else 1.0
    return config.lr * warm * decay


BACKENDS = ("eager", "compile")


class Update:
    """Makes optimizer steps of a run; metrics stay on the device."""

    def __init__(self, config: TrainConfig, loss: MeanFlowLoss, inputs: Inputs):
        """Take the parts that never change; the state comes with each step.

        With `backend=compile` the loss at given noise and times is one compiled graph, derivative and gradient
        included; what is random is drawn before it.
        """
        self.config, self.loss, self.inputs = config, loss, inputs
        self._at = torch.compile(loss.at, fullgraph=True, dynamic=False) if config.backend == "compile" else loss.at

    def __call__(self, state: RunState, raw: Tensor, labels: Tensor, total_steps: int) -> dict[str, Tensor]:
        """One step over the micro-batches `raw` (k, b, ...) with `labels` (k, b), and its metrics, means over them."""
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, state.position.step, total_steps)
        metrics = self.accumulate(state, raw, labels)
        metrics["grad_norm"] = self._clip(state)
        # The fused optimizer skips the whole step on the device where this says so, as for a gradient scaler.
        state.optimizer.found_inf = state.guard.judge(metrics["loss"], metrics["grad_norm"]).float()  # pyright: ignore[reportAttributeAccessIssue]
        state.optimizer.step()
        state.ema.update(state.position.step + 1)
        return metrics

    def accumulate(self, state: RunState, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Leave the mean gradient over the micro-batches in the parameters, and return the mean metrics."""
        state.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        for part, own in zip(raw, labels, strict=True):
            loss, metrics = self.forward(state, part, own)
            (loss / len(raw)).backward()
            for key, value in {"loss": loss.detach(), **metrics}.items():
                total[key] = total.get(key, 0) + value / len(raw)
        return total

    def forward(self, state: RunState, raw: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch with fresh noise, times, mirroring, augmentation and dropped labels."""
        x, augment = self.inputs(raw, state.generator)
        label = labels if self.config.model.class_conditional else None
        drawn = self.loss.draw(x, state.generator)
        label = self.loss.drop_labels(label, state.generator)
        with autocast(self.config.precision, x.device):
            return self._at(state.model, x, *drawn, label, augment)

    def _clip(self, state: RunState) -> Tensor:
        """The norm of the whole gradient, which is scaled to `grad_clip` where it is longer."""
        parameters = [p for p in state.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if (longest := self.config.optimizer.grad_clip) > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, longest, norm)
        return norm

"""A run's optimizer step: what MeanFlow draws and minimises, as a `TrainStep`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import OptimizerConfig, TrainConfig
from fullstride.meanflow.data.inputs import Inputs
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.training.randomize_zero_layers import awake
from fullstride.meanflow.training.state import RunState
from fullstride.step.torch import TrainStep, constant, cosine, warmed_up
from fullstride.step.torch.body import Metrics
from fullstride.step.torch.runners.comparison import StepError
from fullstride.step.torch.schedules import Schedule


def decayed(config: OptimizerConfig, share: float) -> float:
    """The factor of the rate where a share of the run is over: 1, or half a cosine from 1 to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * share) if config.decay == "cosine" else 1.0


def learning_rate(config: OptimizerConfig, step: int, share: float) -> float:
    """The learning rate of step `step` (from 0), a share of the run being over: linear warm-up, then `decayed`."""
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps)) * decayed(config, share)


def schedule(config: OptimizerConfig, total: int) -> Schedule:
    """`learning_rate` as a factor of `lr`, of tensors."""
    return warmed_up(cosine(total) if config.decay == "cosine" else constant, config.warmup_steps)


@dataclass(frozen=True)
class Draw:
    """Fresh noise, times, mirroring, augmentation and dropped labels of a batch, from a generator."""

    loss: MeanFlowLoss
    inputs: Inputs
    conditional: bool

    def __call__(self, batch: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Any]:
        """What the loss is a function of."""
        assert generator is not None
        x, augment = self.inputs(batch["raw"], generator)
        e, t, r = self.loss.draw(x, generator)
        label = self.loss.drop_labels(batch["labels"] if self.conditional else None, generator)
        return {"x": x, "e": e, "t": t, "r": r, "label": label, "augment": augment}


def minimised(loss: MeanFlowLoss) -> Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Metrics]]:
    """The loss of a network and of what `Draw` gives; a step copies what it holds, so it holds no more of a run."""
    return lambda model, drawn: loss.at(model, **drawn)


class Update:
    """Makes optimizer steps of a run; metrics stay on the device."""

    def __init__(self, config: TrainConfig, loss: MeanFlowLoss, inputs: Inputs, state: RunState, rates: Schedule):
        """Take the parts of a run, whose state each step changes, and the factors of its learning rate."""
        self.config, self.loss, self.inputs, self._state = config, loss, inputs, state
        self.processes = state.processes
        self._minimised = minimised(loss)
        self.step = TrainStep(
            self._minimised,
            state.model,
            state.optimizer,
            draw=Draw(loss, inputs, config.model.class_conditional),
            ema=state.ema,
            schedule=rates,
            accumulate=config.gradient_accumulation_steps,
            clip=config.optimizer.grad_clip or None,
            guard=state.guard.judge,
            guard_state=state.guard.tensors.values(),
            precision=config.precision,
            backend=config.backend,
            generator=state.generator,
            gate=config.guard.check_step,
            awaken=self._awaken if config.guard.check_tangents and loss.ratio > 0 else None,
            processes=state.processes,
            shards=state.shards,
        )

    def __call__(self, raw: Tensor, labels: Tensor) -> Metrics:
        """One step over the micro-batches `raw` (k, b, ...) with `labels` (k, b), and its metrics, means over them.

        Raises:
            ConfigError: if the first step disagrees with eager fp32.

        """
        self.step.made = self._state.position.step
        try:
            return self.step(_flat(raw, labels))
        except StepError as error:
            raise ConfigError(f"{error}; guard.check_step=false trains all the same") from None

    def gradients(self, raw: Tensor, labels: Tensor) -> Metrics:
        """Leave the mean gradient over this process's micro-batches in the parameters; no step is made."""
        return replace(self.step.body, accumulate=len(raw), reducer=None).gradients(_flat(raw, labels))

    def _awaken(self, model: nn.Module) -> nn.Module:
        """The same on all processes; the run's own random numbers stay as they are."""
        device = next(model.parameters()).device
        return awake(model, torch.Generator(device).manual_seed(self.config.seed))


def _flat(raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"raw": raw.flatten(0, 1), "labels": labels.flatten(0, 1)}

"""A run's optimizer step: MeanFlow's random draws and objective, for a `TrainStep`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from fullstride.meanflow.config.schema import OptimizerConfig, TrainConfig
from fullstride.meanflow.data.dataset import Decode
from fullstride.meanflow.data.edm_augment import EdmAugment
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.training.state import RunState
from fullstride.step.torch import TrainStep, constant, cosine, warmed_up
from fullstride.step.torch.body import Metrics
from fullstride.step.torch.schedules import Schedule

# A weight that is smaller by this factor than one that keeps the size of what it multiplies stands for zero.
ASLEEP = 0.1
BIAS = 0.3


@torch.no_grad()
def randomize_zero_layers(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The network with random numbers in the weights and biases that are as good as zero."""
    for p in model.parameters():
        keeping = p[0].numel() ** -0.5 if p.ndim > 1 else BIAS
        if (p.square().mean().sqrt() < ASLEEP * keeping) if p.ndim > 1 else not p.any():
            p.normal_(0, keeping, generator=generator)
    return model


def random_hflip(x: Shaped[Tensor, "b c h w"], generator: torch.Generator | None = None) -> Shaped[Tensor, "b c h w"]:
    """Each image mirrored left to right with probability 1/2.

    Args:
        x: images, (batch, channels, height, width), of any type.
        generator: random generator on the images' device; the device's own if None.

    Returns:
        A new tensor.

    """
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device, generator=generator) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def schedule(config: OptimizerConfig, total: int) -> Schedule | None:
    """The learning rate of a run of `total` steps as a factor of `lr`: a linear warm-up, then half a cosine to zero.

    None where it stays `lr`.
    """
    if config.decay == "cosine":
        return warmed_up(cosine(total), config.warmup_steps)
    return warmed_up(constant, config.warmup_steps) if config.warmup_steps else None


@dataclass(frozen=True)
class RecordObjective:
    """Function that a run minimises on batches of raw records; all randomness comes from a generator.

    Attributes:
        meanflow: the loss at drawn noise and times.
        decode: the data set's function from records to the network's input.
        hflip: whether each picture is mirrored with probability 1/2.
        augment: EDM's augmentations, or None.
        conditional: whether the network takes labels.
        condition: function from raw records to conditions, which the network takes as `condition`; or None.

    """

    meanflow: MeanFlowLoss
    decode: Decode
    hflip: bool = False
    augment: EdmAugment | None = None
    conditional: bool = False
    condition: Callable[[Tensor], Tensor] | None = None

    def inputs(self, raw: Tensor, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Inputs in fp32, and the network's further arguments by keyword: augmentation labels or conditions."""
        x = self.decode(raw, generator)
        if self.hflip:
            x = random_hflip(x, generator)
        if self.condition is not None:
            return x, {"condition": self.condition(raw)}
        if self.augment is None:
            return x, {}
        x, labels = self.augment(x, generator)
        return x, {"augment": labels}

    def draw(self, batch: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Any]:
        """Fresh noise, times, mirroring, augmentation and dropped labels: what the loss is a function of."""
        assert generator is not None
        x, conditions = self.inputs(batch["raw"], generator)
        e, t, r = self.meanflow.draw(x, generator)
        label = self.meanflow.drop_labels(batch["labels"] if self.conditional else None, generator)
        conditions |= self.meanflow.draw_inputs(x, t, r, generator)
        drawn = {"x": x, "e": e, "t": t, "r": r, "label": label, "conditions": conditions}
        return drawn | ({"progress": batch["progress"]} if self.meanflow.scheduled else {})

    def __call__(self, model: nn.Module, drawn: dict[str, Any]) -> tuple[Tensor, Metrics]:
        """The loss of a network at what `draw` gives, and its metrics."""
        return self.meanflow.at(model, **drawn)


def build_step(config: TrainConfig, objective: RecordObjective, state: RunState, rates: Schedule | None) -> TrainStep:
    """The step that changes a run's state.

    Batches are `raw` records (b, ...), their `labels` (b,) and, for a loss that is scheduled, `progress` (b,), the
    share of the run that is done.
    """

    def awaken(model: nn.Module) -> nn.Module:
        # Alike on all processes; the run's own random numbers stay as they are.
        return randomize_zero_layers(model, torch.Generator(next(model.parameters()).device).manual_seed(config.seed))

    return TrainStep(
        objective,
        state.model,
        state.optimizer,
        draw=objective.draw,
        ema=state.ema,
        schedule=rates,
        accumulate=config.gradient_accumulation_steps,
        clip=config.optimizer.grad_clip or None,
        guard=state.guard.judge,
        guard_state=state.guard.tensors.values(),
        precision=config.precision,
        backend=config.backend,
        generator=state.generator,
        check_first_step=config.guard.check_step,
        randomize_zeros=awaken if config.guard.check_tangents and objective.meanflow.ratio > 0 else None,
        processes=state.processes,
        shards=state.shards,
    )

"""The watchdog of a training run, as its configuration wants it."""

from pathlib import Path

import torch

from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.training.state import Position, RunState
from fullstride.process.exit_codes import STUCK
from fullstride.process.gpu_activity import GpuUse
from fullstride.process.watchdog import Watchdog
from fullstride.process.watchdog_clocks import Limits, Verdict
from fullstride.runs.early_ends import write_end


def limits_of(config: TrainConfig, device: torch.device) -> Limits:
    """The configuration's limits, in seconds."""
    watch = config.watch
    return Limits(
        first_step=60 * watch.first_step_minutes,
        step=60 * watch.step_minutes,
        evaluation=60 * watch.evaluation_minutes,
        gpu_idle=60 * watch.gpu_idle_minutes if device.type == "cuda" else 0.0,
        checkpoint_factor=watch.checkpoint_factor,
        checkpoint_least=60 * watch.checkpoint_minutes,
        shown=config.guard.stall_seconds,
    )


def watchdog_of(limits: Limits, state: RunState, run: Path, use: GpuUse) -> Watchdog:
    """The watchdog of a run, which reads its position and leaves a line in its ends.jsonl."""

    def tell(verdict: Verdict, step: int) -> None:
        write_end(run, reason=verdict.reason, message=verdict.message, step=step, exit_code=STUCK)

    return Watchdog(limits, lambda: state.position.step, tell, use.busy)


def steps_to_checkpoint(config: TrainConfig, position: Position, steps: int) -> int:
    """How many steps the next checkpoint is away, with `steps` of them in an epoch."""
    every = config.save_every or config.epochs
    epoch = min(config.epochs, (position.epoch // every + 1) * every)
    return max(0, epoch * steps - position.epoch * steps - position.batch)

"""fullstride's side of the comparison: the ordinary trainer, watched."""

from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from benchmarks.experiments.meanflow.watch import TimeUp, Watch
from fullstride.device.select import resolve_device
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.training.trainer import Trainer
from fullstride.runs.folder import SAME_COMMAND
from fullstride.step.torch import cosine_of, warmed_up
from fullstride.step.torch.schedules import Schedule


class WatchedTrainer(Trainer):
    """A trainer that is told to end by a watch, over whose time its rate falls if it does."""

    def __init__(self, config: TrainConfig, watch: Watch):
        """Build the run, as `Trainer`."""
        self.watch, self._decays = watch, config.optimizer.decay == "cosine"
        # Of the time, as the next step has it, on the device.
        self._share = torch.zeros((), dtype=torch.float64, device=resolve_device(config.device))
        super().__init__(config, resume_advice=SAME_COMMAND)
        self.after_step.append(self._look_after_a_step)
        watch.stop = self.stop
        watch.go_on_from(self.state.position.step)
        self._look_at_the_clock()

    def _rates(self) -> Schedule | None:
        if not self._decays:
            return super()._rates()
        return warmed_up(cosine_of(self._share), self.config.optimizer.warmup_steps)

    def _look_at_the_clock(self) -> None:
        if self._decays:
            self._share.fill_(self.watch.share)

    def _look_after_a_step(self) -> None:
        if self.watch.after_step(self.state.position.step, self._scored, self._saved):
            self._watch_steps()
        self._look_at_the_clock()

    def _scored(self) -> nn.Module:
        """The averaged network, which is now going to be scored: the watchdog has to wait."""
        self.watchdog.wait_for("a mark", self.limits.evaluation)
        return self.state.ema.model

    def _saved(self) -> None:
        self._save(must=True)

    def _save(self, *, must: bool) -> Path | None:
        self.watch.keep_clock(self.state.position.step)
        return super()._save(must=must)

    def _end_stopped(self, message: str = "") -> NoReturn:
        # A checkpoint of the start would let the next process compile less, and call that the start-up.
        starting = "" if self.watch.clock.running else "stopped during the start, nothing to save"
        super()._end_stopped(message or starting)


def train_ours(config: TrainConfig, watch: Watch) -> str:
    """Train until the watch ends it, and say why it did.

    Raises:
        ConfigError, FloatingPointError, OutOfMemory, Preempted, KeyboardInterrupt: as `Trainer.run_to_end`.

    """
    try:
        WatchedTrainer(config, watch).run_to_end()
    except TimeUp as over:
        return str(over)
    return "epochs are over before the time"

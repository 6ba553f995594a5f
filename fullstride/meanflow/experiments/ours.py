"""fullstride's side of the comparison: the ordinary trainer, watched."""

from pathlib import Path
from typing import NoReturn

from torch import nn

from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.experiments.watch import TimeUp, Watch
from fullstride.meanflow.trainer import Trainer


class WatchedTrainer(Trainer):
    """A trainer that is told to end by a watch."""

    watch: Watch | None = None

    def _after_step(self) -> None:
        assert self.watch is not None
        if self.watch.after_step(self.state.position.step, self._scored, self._saved):
            self._watch_steps()

    def _scored(self) -> nn.Module:
        """The averaged network, which is now going to be scored: the watchdog has to wait."""
        self.watchdog.wait_for("a mark", self.limits.evaluation)
        return self.state.ema.model

    def _saved(self) -> None:
        self._save(must=True)

    def _save(self, *, must: bool) -> Path | None:
        assert self.watch is not None
        self.watch.keep_clock(self.state.position.step)
        return super()._save(must=must)

    def _end_stopped(self, message: str = "") -> NoReturn:
        assert self.watch is not None
        # A checkpoint of the start would let the next process compile less, and call that the start-up.
        starting = "" if self.watch.clock.running else "stopped during the start, nothing to save"
        super()._end_stopped(message or starting)


def train_ours(config: TrainConfig, watch: Watch) -> str:
    """Train until the watch ends it, and say why it did.

    Raises:
        ConfigError, FloatingPointError, OutOfMemory, Preempted, KeyboardInterrupt: as `Trainer.run_to_end`.

    """
    trainer = WatchedTrainer(config)
    trainer.watch, watch.stop = watch, trainer.stop
    watch.go_on_from(trainer.state.position.step)
    try:
        trainer.run_to_end()
    except TimeUp as over:
        return str(over)
    return "epochs are over before the time"

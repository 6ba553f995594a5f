"""The evaluations during a run: when one is due, its evaluator, and the handling of one that fails."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fullstride.device import memory
from fullstride.errors import OutOfMemory, is_out_of_memory
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.evaluation.evaluator import Evaluator, shared_evaluator
from fullstride.meanflow.training.build import classes_of
from fullstride.meanflow.training.reporter import Reporter
from fullstride.meanflow.training.state import RunState
from fullstride.process.signals import StopSignal
from fullstride.runs.folder import how_to_resume


@dataclass
class EvaluationSchedule:
    """Scores a run's averaged network after the epochs that its configuration names.

    Attributes:
        config: the run's configuration.
        data: the data set that it is trained on and compared with.
        device: the run's device.
        state: the run's state, which is not changed.
        reporter: receiver of the scores, which knows the earlier ones.
        stop: stop signal; it ends an evaluation at once, since nothing of the run is lost.
        evaluator: the evaluator, created at the first evaluation, since its reference takes a while.

    """

    config: TrainConfig
    data: Dataset
    device: torch.device
    state: RunState
    reporter: Reporter
    stop: StopSignal
    evaluator: Evaluator | None = None

    def is_due(self) -> bool:
        """Return whether the current epoch has ended and is one to be scored."""
        epoch, every = self.state.position.epoch, self.config.eval_every
        return bool(every) and epoch > 0 and (epoch == self.config.epochs or epoch % every == 0)

    def is_missing(self) -> bool:
        """Return whether the run was stopped between the end of an epoch and its evaluation. Collective."""
        position = self.state.position
        if position.batch or not self.is_due():
            return False
        return self.state.processes.led(lambda: not self.reporter.has_evaluation(position.step))

    def make(self, save: Callable[[], Path | None]) -> None:
        """Score the run and report it, unless a stop signal comes. Collective.

        Args:
            save: function called before the error of a failed evaluation is raised.

        Raises:
            OutOfMemory: saying which setting to lower.
            ConfigError: if something is missing.

        """
        try:
            # Of several processes each part of the work ends by itself, and all of it if one of them does.
            alone = self.state.processes.size == 1
            scores = self.stop.unless_stopped(self._scores) if alone else self._scores()
        except Exception as error:
            # The steps since the last checkpoint are good, whatever keeps them from being scored.
            save()
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in an evaluation at evaluation.batch_size={self.config.evaluation.batch_size}: "
                f"the peak was {memory.peak_memory(self.device) / memory.GIB:.2f} GiB; step "
                f"{self.state.position.step} is saved; to continue, {how_to_resume(self.config)} and a smaller "
                "evaluation.batch_size"
            ) from None
        if scores is not None:
            self.reporter.evaluation(self.state.position, scores)

    def _scores(self) -> dict[str, dict] | None:
        given, processes = (self.data, self.config.evaluation, self.device), self.state.processes
        if processes.size == 1:
            self.evaluator = self.evaluator or Evaluator(*given)
        elif self.evaluator is None:
            self.evaluator = shared_evaluator(*given, processes, self.stop.unless_stopped)
        if self.evaluator is None:
            return None
        classes = classes_of(self.config.model, self.data.num_classes)
        with self.state.ema.whole(self.state.ema.first) as model:
            return self.evaluator.meanflow_scores(model, classes)

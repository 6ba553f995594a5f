"""The trainings of an experiment, one after the other; several processes that share a folder share them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.experiments.meanflow.jobs import Laboratory, finished, name_of, run_folder, scores_of
from benchmarks.experiments.meanflow.spec import Arm, Job, Part
from benchmarks.harness.budget import say
from fullstride.runs.atomic_files import note
from fullstride.runs.lock import locked


@dataclass(frozen=True)
class Training:
    """A training and what it is asked for."""

    part: Part  # whose samplers score it
    arm: Arm  # what it is called there
    job: Job  # the run

    def __str__(self) -> str:
        """As a line of the output begins."""
        return f"{self.part.name}, {self.arm.name}, seed {self.job.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether it has every score that the part asks for."""
        return finished(self.job, self.part.samplers) is not None


def work_off(trainings: Sequence[Training], name: str) -> None:
    """Make and score, in this order, what is not there yet; what another process is at is left to it.

    A training that diverges keeps none of the others from being made.

    Args:
        trainings: of which several may be one run, asked for by several parts.
        name: of the experiment.

    Raises:
        ConfigError, KeyboardInterrupt, Preempted: as `Laboratory.run`, at once.
        FloatingPointError: if one diverged, once the others are made: the first of them.

    """
    laboratory, diverged, waiting, count = Laboratory(), list[FloatingPointError](), list(trainings), 0
    while waiting:
        left = []
        for training in waiting:
            try:
                told = _told(laboratory, training)
            except FloatingPointError as error:
                diverged.append(error)
                told = f"diverged: {error}"
            if told is None:
                left.append(training)
                continue
            count += 1
            say(f"{count} of {len(trainings)}, {name} {training}: {told}")
        if len(left) == len(waiting):
            note(f"{name}: left to the processes that are at them: {'; '.join(map(str, left))}")
            break
        waiting = left  # one run may serve several of them, and another process may have been stopped
    if diverged:
        raise diverged[0]


def _told(laboratory: Laboratory, training: Training) -> str | None:
    """What came of it; None if another process is at it."""
    job, samplers, took = training.job, training.part.samplers, "there already"
    scores = finished(job, samplers)
    if scores is None:
        run_folder(job).mkdir(parents=True, exist_ok=True)
        with locked(run_folder(job)) as alone:
            if not alone:
                return None
            scores = finished(job, samplers)  # another process may have made them since
            if scores is None:
                start = time.perf_counter()
                scores = laboratory.run(job, samplers)
                took = f"{time.perf_counter() - start:.0f} s"
    first = scores_of(job, scores, samplers[0])
    return f"{took}, {name_of(samplers[0])}: energy distance {first['energy distance']:.4g}"

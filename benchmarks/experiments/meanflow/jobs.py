"""Trainings and their scores, stored in the runs' folders; finished ones are not repeated.

Trainings run one after the other; processes that share a folder divide them.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.experiments.meanflow.spec import Arm, Part, Sampler, TrainingJob
from benchmarks.harness.budget import say
from benchmarks.harness.run_provenance import of_run
from fullstride.device import memory
from fullstride.device.select import resolve_device
from fullstride.errors import Preempted
from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.schema import EvalConfig, TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.evaluation.scores import Score
from fullstride.meanflow.sampling.generate import Generator, load_generator
from fullstride.meanflow.training.trainer import Trainer
from fullstride.process.signals import run_or_stop
from fullstride.runs.atomic_files import note, read_best_effort, replace_file
from fullstride.runs.folder import SAME_COMMAND, numbered, read_metrics
from fullstride.runs.lock import locked

SCORES = "scores.json"
# Key for the seconds that a stopped training took until then.
SPENT = "spent_seconds"
# Key for the earlier scores of a repeated training, until there are as many new ones.
EARLIER = "earlier"
# Share of a run's steps at its end over which its final loss is the mean.
LAST = 0.1
Scores = dict[str, Any]


def name_of(sampler: Sampler) -> str:
    """Return a sampler's name, such as `meanflow 1`."""
    return " ".join(str(part) for part in sampler if part is not None)


def run_folder(job: TrainingJob) -> Path:
    """Return the folder of a job's run."""
    return Path(job.config.output_dir) / job.config.run_name


def finished(job: TrainingJob, samplers: tuple[Sampler, ...]) -> Scores | None:
    """Return a job's scores if every requested sampler is scored, else None."""
    scores = kept(job)
    return scores if all(has(job, scores, sampler) for sampler in samplers) else None


def begun(job: TrainingJob, samplers: tuple[Sampler, ...]) -> Scores | None:
    """Return a job's scores if any requested sampler is scored; of its trainings, the one with more scores."""
    scores = kept(job)
    count = lambda of: sum(has(job, of, sampler) for sampler in samplers)  # noqa: E731
    most = max((scores, scores.get(EARLIER, scores)), key=count)
    return most if count(most) else None


def has(job: TrainingJob, scores: Scores, sampler: Sampler) -> bool:
    """Return whether a sampler is scored."""
    return _key(job.config, sampler) in scores["samplers"]


def kept(job: TrainingJob) -> Scores:
    """Return the scores that a job has stored so far; ConfigError if the file is incomplete."""
    path = run_folder(job) / SCORES
    return read_best_effort(path) if path.is_file() else {"samplers": {}}


def _key(config: TrainConfig, sampler: Sampler) -> str:
    """Scores compare at equal counts, by the same features and precision only, which therefore belong to the name."""
    asked, usual = config.evaluation, EvalConfig()
    name = f"{name_of(sampler)}, {asked.num_samples or 'all'} samples"
    name += f", {' and '.join(asked.features)}" if asked.features else ""
    return name + (f", {asked.precision}" if asked.precision != usual.precision else "")


def scores_of(job: TrainingJob, scores: Scores, sampler: Sampler) -> dict[str, float]:
    """Return a sampler's metrics by their names in tables, and the training's own."""
    found = scores["samplers"][_key(job.config, sampler)]["found"]
    return {**found, "final squared error": scores["squared_error"], "training s": scores["training_seconds"]}


def floor_of(job: TrainingJob, scores: Scores, samplers: tuple[Sampler, ...]) -> dict[str, float]:
    """Return the scores that as many training images get in place of the samplers, of which at least one is scored."""
    scored = next(sampler for sampler in samplers if has(job, scores, sampler))
    return scores["samplers"][_key(job.config, scored)]["floor"]


class Laboratory:
    """Trainer and scorer of jobs; keeps evaluators, whose reference statistics are slow to compute."""

    def __init__(self) -> None:
        self._evaluators: dict[str, Evaluator] = {}

    def run(self, job: TrainingJob, samplers: tuple[Sampler, ...]) -> Scores:
        """Train, or go on training, and score what is not scored yet.

        ConfigError for settings that cannot work here. FloatingPointError if the run diverged. KeyboardInterrupt,
        Preempted after saving if a stop signal came; a score is begun again the next time.
        """
        scores = kept(job)
        if "squared_error" in scores and not (finished(job, samplers) or checkpoints(run_folder(job))):
            say(f"{run_folder(job)}: some scores are missing, and its checkpoints are gone; training it again")
            scores = {"samplers": {}, EARLIER: begun(job, samplers) or scores}
        if "squared_error" not in scores:
            scores |= self._trained(job, scores)
            scores.pop(SPENT, None)
            memory.release(resolve_device(job.config.device))  # what the training held, which is a circle of objects
            _write(job, scores)
        load = cache(lambda: load_generator(run_folder(job), job.config.device))
        for sampler in samplers:
            if (key := _key(job.config, sampler)) not in scores["samplers"]:
                score = lambda sampler=sampler: self._scored(job, sampler, load)  # noqa: E731
                scores["samplers"][key] = run_or_stop(score, f"scoring {key}")
                _write(job, scores)
        return scores

    def _trained(self, job: TrainingJob, scores: Scores) -> Scores:
        run, start = run_folder(job), time.perf_counter()
        before = scores.get(SPENT, 0.0) if checkpoints(run) else 0.0
        try:
            Trainer(job.config, resume_advice=SAME_COMMAND).run_to_end()
        except (Preempted, KeyboardInterrupt):
            if checkpoints(run):
                _write(job, scores | {SPENT: before + time.perf_counter() - start})
            raise
        if not (lines := numbered(read_metrics(run), "squared_error")):
            raise FloatingPointError(f"{run}: no reported loss is finite; lower optimizer.lr")
        return {
            "squared_error": final(lines),
            "training_seconds": before + time.perf_counter() - start,
            "steps": lines[-1]["step"],
        }

    def _scored(self, job: TrainingJob, sampler: Sampler, load: Callable[[], Generator]) -> dict[str, Any]:
        generator = load()
        name = repr((job.config.data, job.config.evaluation, generator.device))
        if name not in self._evaluators:
            data = load_data(job.config.data)
            self._evaluators[name] = Evaluator(data, job.config.evaluation, generator.device)
        evaluator = self._evaluators[name]
        found = evaluator.sampler_score(generator.model, *sampler, generator.num_classes)
        assert found is not None  # nothing ends this one's parts
        values = {"NFE": found.nfe} | metrics(found.score)
        asked = job.config.evaluation
        taken = {"seconds": found.seconds, "backend": asked.backend, "batch_size": asked.batch_size}
        return {"found": values, "floor": metrics(evaluator.floor), "sampling": taken}


def _write(job: TrainingJob, scores: Scores) -> None:
    scores |= of_run(scores)
    if len(scores["samplers"]) >= len(scores.get(EARLIER, {}).get("samplers", ())):
        scores.pop(EARLIER, None)
    replace_file(run_folder(job) / SCORES, json.dumps(scores, indent=1) + "\n")


def final(lines: list[dict[str, Any]]) -> float:
    """Return the mean squared error over the last tenth of the steps, because a single step is noisy."""
    last = lines[-1]["step"]
    return statistics.fmean(line["squared_error"] for line in lines if line["step"] > (1 - LAST) * last)


def metrics(score: Score) -> dict[str, float]:
    """Return the numbers of a score by their names in tables."""
    distances = {"energy distance": score.energy_distance}
    distances |= {features.label: features.frechet for features in score.features.values()}
    return distances | ({} if score.label_accuracy is None else {"labels right": score.label_accuracy})


@dataclass(frozen=True)
class Training:
    """Training with the part that requested it."""

    part: Part  # whose samplers score it
    arm: Arm  # what it is called there
    job: TrainingJob  # the run

    def __str__(self) -> str:
        """Return the label that begins this training's output lines."""
        return f"{self.part.name}, {self.arm.name}, seed {self.job.seed}"

    @property
    def is_finished(self) -> bool:
        """Return whether every requested score is available."""
        return finished(self.job, self.part.samplers) is not None


def work_off(trainings: Sequence[Training], name: str) -> None:
    """Train and score the missing trainings in this order; skip those that another process is working on.

    A training that diverges does not stop the others.

    Several may be one run, requested by several parts. Errors are those of `Laboratory.run`, at once;
    FloatingPointError is the first of those that diverged, after the others have finished.
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
            note(f"{name}: in progress in other processes: {'; '.join(map(str, left))}")
            break
        waiting = left  # one run may serve several of them, and another process may have been stopped
    if diverged:
        raise diverged[0]


def _told(laboratory: Laboratory, training: Training) -> str | None:
    """Train and score if necessary, and return a summary; None if another process is working on it."""
    job, samplers, took = training.job, training.part.samplers, "already done"
    if job.teacher is not None and "squared_error" not in kept(job.teacher):
        return None  # another process is training it
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

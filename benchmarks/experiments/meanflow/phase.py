"""Run of an experiment's jobs: train, gather the results, and show them."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.meanflow.jobs import (
    Scores,
    Training,
    begun,
    floor_of,
    has,
    kept,
    name_of,
    run_folder,
    work_off,
)
from benchmarks.experiments.meanflow.phase_rows import FLOOR, apart, by_evaluations, rows_of
from benchmarks.experiments.meanflow.phases import PHASES
from benchmarks.experiments.meanflow.spec import SCALES, Arm, Experiment, Part, TrainingJob, by_key
from benchmarks.harness.result_paths import SEEDS
from benchmarks.harness.run_provenance import expect_here, of_runs
from benchmarks.harness.seeds import (
    ExperimentResult,
    NothingFinished,
    Outcome,
    PartResult,
    conclude,
    seeds_in_words,
)
from benchmarks.harness.time_limit import Limit
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.evaluation.preflight import check_generating

NONE = Limit()


@dataclass(frozen=True)
class ExperimentRequest:
    """Request of one call of the experiments."""

    scale: str = "cpu"  # smoke, cpu or gpu
    parts: tuple[str, ...] = ()  # names; all if empty
    seeds: tuple[int, ...] = SEEDS  # of the trainings
    collect: bool = False  # run nothing, gather what is there
    # The folder of runs, which may be shared by several processes with other seeds or parts.
    runs: Path = Path("runs/experiments")
    overrides: tuple[str, ...] = ()  # key=value of all trainings, such as data=cifar10
    arms: tuple[str, ...] = ()  # names, with their teachers; all if empty

    def check(self, name: str) -> None:
        """See that these parts can be, before anything begins; ConfigError for an unknown scale or part, or an override
        that is none, or of what all arms of a part differ in.
        """
        one_of("--scale", self.scale, SCALES)
        for part in self.parts:
            one_of("--part", part, [p.name for p in PHASES[name].parts])
        for arm in self.arms:
            one_of("--arm", arm, [a.name for part in self.parts_of(PHASES[name]) for a in part.arms])
        for part in self.parts_of(PHASES[name]):
            if own := sorted(by_key(self.overrides).keys() & {key for arm in part.arms for key in arm.settings}):
                raise ConfigError(f"{', '.join(own)}: set by the arms of --part {part.name}; omit it")

    def parts_of(self, experiment: Experiment) -> list[Part]:
        """Return the requested parts."""
        return [part for part in experiment.parts if not self.parts or part.name in self.parts]

    def arms_of(self, part: Part) -> list[Arm]:
        """Return the requested arms of a part, and those that they learn from."""
        taught = {arm.settings.get("loss.teacher") for arm in part.arms if arm.name in self.arms}
        return [arm for arm in part.arms if not self.arms or arm.name in self.arms or arm.name in taught]

    @property
    def root(self) -> str:
        """Folder of this scale's runs."""
        return str(self.runs / self.scale)


def run(name: str, asked: ExperimentRequest, out: Path, limit: Limit = NONE) -> Path:
    """Run what is missing, write the result of everything finished, and print it.

    The result holds everything of the experiment that is scored; the limit ends a training or a score. ConfigError
    for an unknown scale or part, or a device that is not there, before anything runs; if nothing is scored.
    Preempted or KeyboardInterrupt after saving, if a stop signal came.
    """
    experiment = PHASES[name]
    asked.check(name)
    work = None if asked.collect else lambda: _run_missing(experiment, asked)
    return conclude(lambda: gathered(experiment, asked), out, limit, work)


def trainings(experiment: Experiment, asked: ExperimentRequest) -> list[Training]:
    """Return all requested trainings, seed by seed."""
    return [
        Training(part, arm, TrainingJob.of(part, arm, asked.scale, seed, asked.root, asked.overrides))
        for seed in asked.seeds
        for part in asked.parts_of(experiment)
        for arm in asked.arms_of(part)
    ]


def count_missing(name: str, asked: ExperimentRequest) -> int:
    """Return how many runs a call would train or score; ConfigError if a device is unavailable."""
    wanted = trainings(PHASES[name], asked)
    _expect_devices(wanted)
    return len({run_folder(training.job) for training in wanted if not training.is_finished})


def _expect_devices(wanted: list[Training]) -> None:
    """Check all devices before the first training: each must exist and support the requested sampling."""
    for training in wanted:
        check_generating(training.job.config.evaluation, resolve_device(training.job.config.device))


def _run_missing(experiment: Experiment, asked: ExperimentRequest) -> None:
    wanted = trainings(experiment, asked)
    _expect_devices(wanted)
    if not all(training.is_finished for training in wanted):
        expect_here((kept(training.job) for training in wanted), wanted[0].job.config.device)
    work_off(wanted, experiment.name)


def gathered(experiment: Experiment, asked: ExperimentRequest) -> ExperimentResult:
    """Return everything of an experiment that is scored at a scale.

    NothingFinished if nothing is. ConfigError if runs are of different machines.
    """
    parts, missing, devices, runs = [], [], set(), list[Scores]()
    for part in experiment.parts:
        found, absent = _found(part, asked, must=part in asked.parts_of(experiment))
        every = [one for of in found.values() for one in of]
        why = apart(part, every)
        missing += [*absent, *why.values()]
        runs += [scores for _, scores in every]
        devices |= {job.config.device for job, _ in every}
        rows = [row for arm, of in found.items() for row in rows_of(part, arm, of, why)]
        if every:  # what real images score, which no seed changes
            floor = floor_of(*every[0], part.samplers)
            values = {name: {0: value} for name, value in floor.items() if name not in why}
            rows.append(Outcome({"training": FLOOR, "sampler": ""}, values))
        parts.append(PartResult(part.name, part.title, part.question, rows))
    if not any(part.rows for part in parts):
        raise NothingFinished(f"{asked.root}: no scores of {experiment.name}; run it without --collect first")
    device = devices.pop()
    return ExperimentResult(
        experiment.name,
        experiment.title,
        experiment.about,
        asked.scale,
        device,
        {"seeds": list(asked.seeds), "scale": asked.scale}
        | ({"overrides": list(asked.overrides)} if asked.overrides else {}),
        parts,
        of_runs(runs, device),
        curves=[curve for part in parts if (curve := by_evaluations(part))],
        missing=missing,
    )


def _found(
    part: Part, asked: ExperimentRequest, must: bool
) -> tuple[dict[str, list[tuple[TrainingJob, Scores]]], list[str]]:
    """The runs of a part that have a score, by arm, and what is missing of it; ConfigError if the overrides cannot be
    of the part and it `must` be there; another one is missing then.
    """
    found, missing = dict[str, list[tuple[TrainingJob, Scores]]](), []
    try:
        for arm in part.arms:
            jobs = [TrainingJob.of(part, arm, asked.scale, seed, asked.root, asked.overrides) for seed in asked.seeds]
            there = [(job, scores) for job in jobs if (scores := begun(job, part.samplers)) is not None]
            absent = {job.seed for job in jobs} - {job.seed for job, _ in there}
            missing += [f"{part.name}, {arm.name}, {seeds_in_words(absent)}"] if absent else []
            lacking = dict[str, set[int]]()  # seeds by what they have no score of
            for job, scores in there:
                if names := " and ".join(name_of(one) for one in part.samplers if not has(job, scores, one)):
                    lacking.setdefault(names, set()).add(job.seed)
            for names, seeds in lacking.items():
                missing.append(f"{part.name}, {arm.name}, {seeds_in_words(seeds)}: the score of {names}")
            found |= {arm.name: there} if there else {}
    except ConfigError as error:
        if must:
            raise
        return {}, [f"{part.name}: not with these overrides ({error})"]
    return found, missing

"""Runs an experiment's jobs, gathers what they found, and shows it."""

from dataclasses import dataclass
from pathlib import Path

from fullstride.bench.experiment_table import show
from fullstride.bench.experiments import (
    Curve,
    ExperimentResult,
    NothingFinished,
    Outcome,
    PartResult,
    mean,
    seeds_in_words,
    write_experiment,
)
from fullstride.bench.origins import expect_here, of_runs
from fullstride.device import resolve_device
from fullstride.errors import ConfigError, one_of
from fullstride.limit import Limit
from fullstride.meanflow.experiments.jobs import Scores, finished, floor_of, kept, name_of, run_folder, scores_of
from fullstride.meanflow.experiments.phases import PHASES
from fullstride.meanflow.experiments.settings import SCALES
from fullstride.meanflow.experiments.spec import SEEDS, Arm, Experiment, Job, Part, by_key
from fullstride.meanflow.experiments.trainings import Training, work_off

NONE = Limit()
FLOOR = "floor: as many training images"
# Of a run, whichever sampler.
OF_TRAINING = ("final squared error", "training s")


@dataclass(frozen=True)
class Asked:
    """What a call runs.

    Attributes:
        scale: smoke, cpu or gpu.
        parts: names; all if empty.
        seeds: of the trainings.
        collect: run nothing, gather what is there.
        runs: the folder of runs, which may be shared by several processes with other seeds or parts.
        overrides: key=value of all trainings, such as data=cifar10.

    """

    scale: str = "cpu"
    parts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    collect: bool = False
    runs: Path = Path("runs/experiments")
    overrides: tuple[str, ...] = ()

    def check(self, name: str) -> None:
        """See that these parts can be, before anything begins.

        Raises:
            ConfigError: for an unknown scale or part, or an override that is none, or of what all arms of a part differ
                in.

        """
        one_of("--scale", self.scale, SCALES)
        for part in self.parts:
            one_of("--part", part, [p.name for p in PHASES[name].parts])
        for part in self.parts_of(PHASES[name]):
            if own := sorted(by_key(self.overrides).keys() & {key for arm in part.arms for key in arm.settings}):
                raise ConfigError(f"{', '.join(own)}: the arms of --part {part.name} have their own; leave it out")

    def parts_of(self, experiment: Experiment) -> list[Part]:
        """Those that are asked for."""
        return [part for part in experiment.parts if not self.parts or part.name in self.parts]

    @property
    def root(self) -> str:
        """The folder of this scale's runs."""
        return str(self.runs / self.scale)


def run(name: str, asked: Asked, out: Path, limit: Limit = NONE) -> Path:
    """Run what is not there yet, write the result of everything that is, and print it.

    Args:
        name: phase2 to phase5.
        asked: what is run; the result holds whatever of the experiment is finished.
        out: folder for the JSON.
        limit: of this process, whose SIGTERM ends a training or a score; what is finished by then is gathered.

    Returns:
        The file.

    Raises:
        ConfigError: for an unknown scale or part, or a device that is not there, before anything runs; if nothing is
            finished.
        Preempted, KeyboardInterrupt: after saving, if a stop signal came.

    """
    experiment = PHASES[name]
    asked.check(name)
    cut = None if asked.collect else limit.cuts(lambda: _run_missing(experiment, asked))
    try:
        result = gathered(experiment, asked)
    except NothingFinished as nothing:
        raise cut or nothing from None
    path = write_experiment(result, out)
    show(result, path)
    if cut:
        raise cut
    return path


def trainings(experiment: Experiment, asked: Asked) -> list[Training]:
    """All that a call asks for, seed by seed."""
    return [
        Training(part, arm, Job.of(part, arm, asked.scale, seed, asked.root, asked.overrides))
        for seed in asked.seeds
        for part in asked.parts_of(experiment)
        for arm in part.arms
    ]


def count_missing(name: str, asked: Asked) -> int:
    """How many runs a call would have to make or to score.

    Raises:
        ConfigError: for a device that is not there.

    """
    wanted = trainings(PHASES[name], asked)
    _expect_devices(wanted)
    return len({run_folder(training.job) for training in wanted if not training.is_finished})


def _expect_devices(wanted: list[Training]) -> None:
    """One that is absent is told before the first hour of the others."""
    for device in {training.job.config.device for training in wanted}:
        resolve_device(device)


def _run_missing(experiment: Experiment, asked: Asked) -> None:
    wanted = trainings(experiment, asked)
    _expect_devices(wanted)
    if not all(training.is_finished for training in wanted):
        expect_here((kept(training.job) for training in wanted), wanted[0].job.config.device)
    work_off(wanted, experiment.name)


def gathered(experiment: Experiment, asked: Asked) -> ExperimentResult:
    """Everything of an experiment that is finished at a scale.

    Raises:
        NothingFinished: if nothing is.
        ConfigError: if runs are of different machines.

    """
    parts, missing, devices, runs = [], [], set(), list[Scores]()
    for part in experiment.parts:
        rows, floors = [], []
        for arm in part.arms:
            jobs = [Job.of(part, arm, asked.scale, seed, asked.root, asked.overrides) for seed in asked.seeds]
            found = [(job, scores) for job in jobs if (scores := finished(job, part.samplers)) is not None]
            there = [job.seed for job, _ in found]
            runs += [scores for _, scores in found]
            missing += [f"{part.name}, {arm.name}, seed {job.seed}" for job in jobs if job.seed not in there]
            devices |= {job.config.device for job in jobs}
            rows += _rows(part, arm, found) if found else []
            floors = [floor_of(job, scores, part.samplers[0]) for job, scores in found] or floors
        rows += [_floor(floors[0])] if floors else []
        parts.append(PartResult(part.name, part.title, part.question, rows))
    if not any(part.rows for part in parts):
        raise NothingFinished(f"{asked.root}: nothing of {experiment.name} is finished there; run it without --collect")
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


def _rows(part: Part, arm: Arm, found: list[tuple[Job, Scores]]) -> list[Outcome]:
    """A row a sampler; what belongs to the training stands in the first."""
    rows = []
    settings = found[0][0].overrides
    for sampler in part.samplers:
        values: dict[str, dict[int, float]] = {}
        for job, scores in found:
            for metric, value in scores_of(job, scores, sampler).items():
                if sampler == part.samplers[0] or metric not in OF_TRAINING:
                    values.setdefault(metric, {})[job.seed] = value
        rows.append(Outcome({"training": arm.name, "sampler": name_of(sampler)}, values, settings))
    return rows


def _floor(floor: dict[str, float]) -> Outcome:
    """What real images score, which no seed changes."""
    return Outcome({"training": FLOOR, "sampler": ""}, {name: {0: value} for name, value in floor.items()})


def by_evaluations(part: PartResult) -> Curve | None:
    """Energy distance against network evaluations: by kind of sampler of one training, or by training of several."""
    rows = [row for row in part.rows if row.labels["sampler"]]
    several = len({row.labels["training"] for row in rows}) > 1
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = row.labels["training"] if several else row.labels["sampler"].split()[0]
        nfe, energy = (mean(list(row.values[name].values())) for name in ("NFE", "energy distance"))
        series.setdefault(name, []).append((nfe, energy))
    if max((len(points) for points in series.values()), default=0) < (3 if several else 4):
        return None
    seeds = " or ".join(sorted({seeds_in_words(row.seeds) for row in rows}))
    caption = f"{part.title}: energy distance to held-out images by network evaluations an image, mean over {seeds}"
    caption += f"; {', '.join(dict.fromkeys(row.labels['sampler'] for row in rows))}." if several else "."
    return Curve(part.name, caption, "network evaluations (log)", "energy distance (log)", series, log_x=True)

"""The tables of the documentation about MeanFlow's experiments, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness.seeds import seeds_in_words
from benchmarks.report.doc_tables import race
from benchmarks.report.doc_tables.one_step import one_step
from benchmarks.report.doc_tables.over_seeds import (
    EULER,
    FINE,
    ONE,
    TWO,
    Metric,
    compared,
    mean_and_spread,
    of_seeds,
    sampler_in_words,
    seeds_of,
)
from benchmarks.report.markdown import MarkdownTable, the_experiment, the_part
from benchmarks.report.reading import Folder, Source
from fullstride.errors import ConfigError

ENERGY, FEATURES, RIGHT, ERROR = "energy distance", "FD-classifier", "labels right", "final squared error"
SOLVERS = {"meanflow": "MeanFlow", "euler": "Euler", "heun": "Heun", "rk4": "RK4"}


@dataclass(frozen=True)
class Column:
    """A metric of one sampler's images.

    Attributes:
        metric: its name in the result.
        sampler: its name there.
        form: of the numbers, as `format` takes it.

    """

    metric: str
    sampler: str = ONE
    form: str = ".4f"

    @property
    def is_distance(self) -> bool:
        """Whether the lowest is the best: squared errors are of different targets, labels right are no distance."""
        return self.metric in (ENERGY, FEATURES)

    @property
    def header(self) -> str:
        """For people; the squared error is the training's, whatever samples."""
        unit = ", %" if self.metric == RIGHT else ""
        return self.metric if self.metric == ERROR else f"{self.metric}{unit}, {sampler_in_words(self.sampler)}"

    def cells(self, metrics: list[Metric | None]) -> list[str]:
        """The column's, the best distance in bold where it is `clearly_lowest`."""
        if self.is_distance:
            return compared(metrics, self.form)
        factor = 100.0 if self.metric == RIGHT else 1.0
        return ["" if metric is None else mean_and_spread(metric, self.form, factor) for metric in metrics]


_ENERGIES, _FEATURES, _ERROR = (Column(ENERGY), Column(ENERGY, EULER)), Column(FEATURES, ONE, ".1f"), Column(ERROR)
_ABLATED = (
    *(Column(ENERGY, sampler) for sampler in (ONE, TWO, EULER)),
    *(Column(FEATURES, sampler, ".1f") for sampler in (ONE, TWO, EULER)),
    Column(RIGHT, ONE, ".1f"),
)
_NEAR_A_SOLVER = tuple(
    Column(metric, sampler, form)
    for metric, form in ((ENERGY, ".4f"), (FEATURES, ".1f"))
    for sampler in (ONE, TWO, FINE)
)
# By part.
COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "overfit": (*_ENERGIES, _FEATURES, _ERROR),
    "multiclass": (*_ENERGIES, _FEATURES, _ERROR),
    "weighting": (Column(ENERGY), _FEATURES, _ERROR),
    "ratio": _ABLATED,
    "times": _ABLATED,
    "power": _ABLATED,
    "objective": _NEAR_A_SOLVER,
    "objective-labels": _NEAR_A_SOLVER,
    "objective-unweighted": _NEAR_A_SOLVER,
    "objective-constant": _NEAR_A_SOLVER,
    "weight": _NEAR_A_SOLVER,
    "weight-labels": _NEAR_A_SOLVER,
}


def trainings(scale: str, phase: str, part: str, folder: Folder) -> MarkdownTable:
    """A part of a phase at a scale, cpu or gpu: one row a training, then the floor.

    In bold is the lowest distance of a column over the trainings, if the next is farther away than the larger standard
    deviation of the two; the floor does not take part.
    """
    source = the_experiment(folder, f"experiment-{phase}--{scale}--")
    table = MarkdownTable(("training", *(column.header for column in COLUMNS[part])))
    sampled, floor = _split(source, part)
    found = {(row["labels"]["training"], row["labels"]["sampler"]): row["metrics"] for row in sampled}
    every = set(source.data["conditions"]["seeds"])
    usual = dict[str, set[int]]()
    for row in sampled:  # of the first sampler: the others may have been scored for fewer
        usual.setdefault(row["labels"]["training"], seeds_of([row["metrics"][ENERGY]]))
    columns = []
    for column in COLUMNS[part]:
        metrics = _of_column(source, found, list(usual), column)
        cells = zip(column.cells(metrics), metrics, usual.values(), strict=True)
        columns.append([of_seeds(cell, metric, seeds) for cell, metric, seeds in cells])
        columns[-1] += column.cells([row["metrics"].get(column.metric) for row in floor])
    table.note = _note(sampled)
    names = [_named(name, seeds, every) for name, seeds in usual.items()]
    names += [f"*{row['labels']['training']}*" for row in floor]
    for name, *cells in zip(names, *columns, strict=True):
        table.add(name, *cells, of=source)
    return table


def solvers(scale: str, folder: Folder) -> MarkdownTable:
    """Energy distances of one network's ways of sampling, a row so many evaluations of it; the floor is every column's.

    In bold is the lowest of a row, if the next is farther away than the larger standard deviation of the two.
    """
    source = the_experiment(folder, f"experiment-phase3--{scale}--")
    sampled, floor = _split(source, "solvers")
    sampled.sort(key=lambda row: row["metrics"]["NFE"]["mean"])
    found: dict[str, dict[str, Metric]] = {}
    for row in sampled:
        of = found.setdefault(_evaluations(row["metrics"]["NFE"]), {})
        if _kind(row) in of:
            raise ConfigError(f"{source.name}: two trainings of part 'solvers'; the table has a place for one")
        of[_kind(row)] = row["metrics"][ENERGY]
    kinds = sorted({_kind(row) for row in sampled}, key=[*SOLVERS, *map(_kind, sampled)].index)
    table = MarkdownTable(("network evaluations", *(SOLVERS.get(kind, kind) for kind in kinds)))
    every = _seeds(sampled)
    for evaluations, of in found.items():
        metrics = [of.get(kind) for kind in kinds]
        cells = [of_seeds(*each, every) for each in zip(compared(metrics), metrics, strict=True)]
        table.add(evaluations, *cells, of=source)
    table.note = _note(sampled)
    for row in floor:
        table.add(f"*{row['labels']['training']}*", *[mean_and_spread(row["metrics"][ENERGY])] * len(kinds), of=source)
    return table


def _split(source: Source, part: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of samplers, and the floor's, which has none."""
    rows = the_part(source, part)
    return [row for row in rows if row["labels"]["sampler"]], [row for row in rows if not row["labels"]["sampler"]]


def _note(sampled: list[dict[str, Any]]) -> str:
    seeds = _seeds(sampled)
    what = "Means and standard deviations over" if len(seeds) > 1 else "One run each,"
    return f"{what} {seeds_in_words(seeds)}."


def _seeds(rows: list[dict[str, Any]]) -> set[int]:
    return {seed for row in rows for seed in seeds_of(row["metrics"].values())}


def _named(training: str, got: set[int], every: set[int]) -> str:
    """The training; with its seeds where some were not run."""
    return training if got == every else f"{training} ({seeds_in_words(got)})"


def _of_column(
    source: Source, found: dict[tuple[str, str], dict[str, Metric]], trainings: list[str], column: Column
) -> list[Metric | None]:
    """Each training's; None of one that was not scored so, as where a run was stopped."""
    # What belongs to the training, as its squared error, stands with the part's first sampler.
    metrics = [found.get((training, column.sampler), {}).get(column.metric) for training in trainings]
    if not any(metrics):
        raise ConfigError(f"{source.name}: no {column.metric} of {column.sampler}; run the experiment again")
    return metrics


def _kind(row: dict[str, Any]) -> str:
    return row["labels"]["sampler"].partition(" ")[0]


def _evaluations(nfe: Metric) -> str:
    """A solver that chooses its steps takes another number of them for every seed."""
    return mean_and_spread(nfe, ".0f") if nfe["spread"] else f"{nfe['mean']:.0f}"


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "phase2-cpu": partial(trainings, "cpu", "phase2", "overfit"),
    "phase3-solvers-cpu": partial(solvers, "cpu"),
    "phase3-multiclass-cpu": partial(trainings, "cpu", "phase3", "multiclass"),
    "phase3-weighting-cpu": partial(trainings, "cpu", "phase3", "weighting"),
    "phase4-ratio-cpu": partial(trainings, "cpu", "phase4", "ratio"),
    "phase4-times-cpu": partial(trainings, "cpu", "phase4", "times"),
    "phase4-power-cpu": partial(trainings, "cpu", "phase4", "power"),
    "phase5-objective-cpu": partial(trainings, "cpu", "phase5", "objective"),
    "phase5-objective-labels-cpu": partial(trainings, "cpu", "phase5", "objective-labels"),
    "phase5-objective-unweighted-cpu": partial(trainings, "cpu", "phase5", "objective-unweighted"),
    "phase5-objective-constant-cpu": partial(trainings, "cpu", "phase5", "objective-constant"),
    "phase6-weight-cpu": partial(trainings, "cpu", "phase6", "weight"),
    "phase6-weight-labels-cpu": partial(trainings, "cpu", "phase6", "weight-labels"),
    "phase2-gpu": partial(trainings, "gpu", "phase2", "overfit"),
    "phase3-solvers-gpu": partial(solvers, "gpu"),
    "phase3-multiclass-gpu": partial(trainings, "gpu", "phase3", "multiclass"),
    "phase3-weighting-gpu": partial(trainings, "gpu", "phase3", "weighting"),
    "phase4-ratio-gpu": partial(trainings, "gpu", "phase4", "ratio"),
    "phase4-times-gpu": partial(trainings, "gpu", "phase4", "times"),
    "phase4-power-gpu": partial(trainings, "gpu", "phase4", "power"),
    "phase5-objective-gpu": partial(trainings, "gpu", "phase5", "objective"),
    "race-frechet-gpu": partial(race.race, "FD-classifier", "gpu"),
    "race-energy-gpu": partial(race.race, "energy distance", "gpu"),
    "race-end-gpu": partial(race.end, "gpu"),
    "race-falling-gpu": partial(race.falling, "gpu"),
    "race-recipes": race.recipes,
    "one-step-gpu": one_step,
}

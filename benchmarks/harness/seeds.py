"""Experiments as JSON: the request, mean and spread over seeds, and the value of every seed."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import machine_slug
from benchmarks.harness.results import check_keys, finite, write_json
from benchmarks.harness.time_limit import Limit
from fullstride.errors import ConfigError, Preempted
from fullstride.measure.roofline import Ceilings

FORMAT = 1
KEYS: dict[str, type] = {
    "experiment": str, "title": str, "about": str, "scale": str, "device": str, "conditions": dict, "parts": list,
    "claims": list, "curves": list, "missing": list,
}  # fmt: skip


class NothingFinished(ConfigError):  # noqa: N818, it says that there is nothing yet
    """Error for a result to which no finished run contributes."""


def mean(values: list[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.fmean(values)


def spread(values: list[float]) -> float | None:
    """Return the standard deviation over seeds, with n - 1; None for a single one."""
    return statistics.stdev(values) if len(values) > 1 else None


def seeds_in_words(seeds: Iterable[int]) -> str:
    """Format seeds, such as `seed 3` or `seeds 0, 1 and 2`."""
    *some, last = (str(seed) for seed in sorted(set(seeds)))
    return f"seeds {', '.join(some)} and {last}" if some else f"seed {last}"


@dataclass(frozen=True)
class Outcome:
    """Row of a part: its labels, and each seed's metrics."""

    labels: dict[str, str]  # what tells the row apart, by column
    values: dict[str, dict[int, float]]  # by metric, then by seed
    # How the run differs from the defaults, in the command line's spelling.
    settings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Outcome":
        """Parse a written row; KeyError, TypeError or ValueError if it is none."""
        values = {}
        for name, metric in dict(row["metrics"]).items():
            finite(metric["mean"])
            if metric["spread"] is not None:
                finite(metric["spread"])
            values[name] = {int(seed): finite(value) for seed, value in dict(metric["seeds"]).items()}
        return cls(dict(row["labels"]), values, list(row["settings"]))

    @property
    def seeds(self) -> set[int]:
        """Seeds that have values."""
        return {seed for found in self.values.values() for seed in found}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary with mean and spread besides the values."""
        metrics = {
            name: {
                "mean": mean(list(found.values())),
                "spread": spread(list(found.values())),
                "seeds": {str(seed): value for seed, value in sorted(found.items())},
            }
            for name, found in self.values.items()
            if found
        }
        return {"labels": self.labels, "metrics": metrics, "settings": self.settings}


@dataclass(frozen=True)
class PartResult:
    """Part of an experiment: one question and its rows."""

    name: str  # short
    title: str  # of its table
    question: str  # what it asks, and how to read the answer
    rows: list[Outcome]  # the answer


@dataclass(frozen=True)
class Claim:
    """Claim made beforehand, and whether it was confirmed."""

    text: str  # the claim
    found: str  # what was measured instead of it
    holds: bool | None  # None where it could not be judged


@dataclass(frozen=True)
class Curve:
    """Figure of lines."""

    name: str  # of its file
    caption: str  # what it shows
    xlabel: str  # of the horizontal axis
    ylabel: str  # of the vertical one
    series: dict[str, list[tuple[float, float]]]  # by name, pairs (x, y)
    log_x: bool = False  # whether the horizontal axis is logarithmic
    log_y: bool = True  # whether the vertical one is


@dataclass(frozen=True)
class Picture:
    """Grid of images."""

    name: str  # of its file
    caption: str  # what its rows and columns are
    png: str  # base64
    # What each row of images is, if they are told apart; as high as each other.
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExperimentResult:
    """Result of an experiment at one scale on one machine."""

    experiment: str  # its command's name
    title: str  # for people
    about: str  # what it shows, and what it cannot
    scale: str  # smoke, cpu or gpu
    device: str  # cpu, cuda or mps
    conditions: dict[str, Any]  # what holds for all rows
    parts: list[PartResult]  # the tables
    environment: dict[str, Any]  # see `environment.environment`
    claims: list[Claim] = field(default_factory=list)  # what was to be checked
    curves: list[Curve] = field(default_factory=list)  # figures
    pictures: list[Picture] = field(default_factory=list)  # grids of images
    missing: list[str] = field(default_factory=list)  # what of it has not been run
    # Rates measured beside a step that was timed, by what names its rows; older files have none.
    ceilings: dict[str, Ceilings] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        parts = [
            {"name": p.name, "title": p.title, "question": p.question, "rows": [row.to_dict() for row in p.rows]}
            for p in self.parts
        ]
        return {"format": FORMAT, **{key: getattr(self, key) for key in KEYS}} | {
            "parts": parts,
            "claims": [asdict(claim) for claim in self.claims],
            "curves": [asdict(curve) for curve in self.curves],
            "pictures": [asdict(picture) for picture in self.pictures],
            "environment": self.environment,
            **({"ceilings": {name: vars(rates) for name, rates in self.ceilings.items()}} if self.ceilings else {}),
        }

    @property
    def file_name(self) -> str:
        """`experiment-name--scale--machine.json`."""
        return f"experiment-{self.experiment}--{self.scale}--{machine_slug(self.device, self.environment)}.json"


def write_experiment(result: ExperimentResult, folder: Path) -> Path:
    """Write the result whole, replacing an older one of the same experiment, scale and machine; ValueError, TypeError
    if a number is not finite or a value is none of JSON's; the older file stays.
    """
    return write_json(result.to_dict(), folder / result.file_name)


def check_experiment(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Validate the data of a file; ConfigError if it has another format or is incomplete."""
    if (found := data.get("format")) != FORMAT:
        raise ConfigError(f"{path}: format {found!r} of an experiment, expected {FORMAT}; run the experiment again")
    check_keys(data, KEYS, path, "run the experiment again")
    try:
        for row in (row for part in data["parts"] for row in part["rows"]):
            Outcome.of(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: a part is incomplete ({type(error).__name__}: {error}), expected rows of labels, metrics by seed "
            "and settings; run the experiment again"
        ) from None
    return data


def conclude(
    gather: Callable[[], ExperimentResult], out: Path, limit: Limit, work: Callable[[], object] | None = None
) -> Path:
    """Do the work as far as the limit allows, then gather, write and show the result; return its path.

    What cut the work is raised at the end; Preempted, too, if the limit was over before anything was finished.
    """
    cut = limit.cuts(work) if work else None
    try:
        result = gather()
    except NothingFinished as nothing:
        if cut or limit.left > 0:
            raise cut or nothing from None
        message = f"--limit {limit.seconds:g}: nothing is finished yet; run the same command to resume"
        raise Preempted(message) from nothing
    from benchmarks.harness.experiment_table import show

    path = write_experiment(result, out)
    show(result, path)
    if cut:
        raise cut
    return path

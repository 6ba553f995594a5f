"""A folder of results: those that `python -m benchmarks` wrote, and files of other kinds."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.results import SCHEMA, cut_short, finite, read_result
from benchmarks.harness.seeds import check_experiment
from fullstride.errors import ConfigError

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Measurement:
    """One row of a result, times in milliseconds.

    Attributes:
        name: what was timed.
        median: the median of its samples.
        p10: their 10th percentile.
        p90: their 90th.
        floor: its roofline bound.
        bound: what binds it, arithmetic or memory.
        over_floor: median over the roofline bound.
        extra: whatever else its case keeps.
        peak_bytes: most device memory that was alive; None where it is not known.

    """

    name: str
    median: float
    p10: float
    p90: float
    floor: float
    bound: str
    over_floor: float
    extra: dict[str, Any]
    peak_bytes: int | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Measurement":
        """From a row as it is written; KeyError, TypeError or ValueError where it is none."""
        timing, floor = row["timing"], row["floor"]
        return cls(
            name=str(row["name"]),
            median=finite(timing["median_ms"]),
            p10=finite(timing["p10_ms"]),
            p90=finite(timing["p90_ms"]),
            floor=finite(floor["ms"]),
            bound=str(floor["bound"]),
            over_floor=finite(row["over_floor"]),
            extra=dict(row["extra"]),
            peak_bytes=timing.get("peak_bytes"),
        )


@dataclass(frozen=True)
class Source:
    """A file of results and where its numbers come from.

    Attributes:
        name: the file's.
        data: the whole JSON.

    """

    name: str
    data: dict[str, Any]

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, versions, commit and date, as far as the file has them."""
        found = self.data.get("environment")
        return found if isinstance(found, dict) else {}

    def _text(self, key: str) -> str | None:
        """Of the environment; what is no text, as in a file that was changed by hand, is as if not recorded."""
        found = self.environment.get(key)
        return found if isinstance(found, str) else None

    @property
    def commit(self) -> str | None:
        """The commit that was measured."""
        return self._text("commit")

    @property
    def code(self) -> dict[str, str] | None:
        """Digests of the files that were loaded when it was measured; None in results that have none."""
        found = self.environment.get("code")
        return found if isinstance(found, dict) else None

    @property
    def command(self) -> str | None:
        """The command line that measured it; None in results that do not say."""
        return self._text("command")

    @property
    def dirty(self) -> bool | None:
        """Whether there were changes beside the commit; None if that is not known."""
        return self.environment.get("dirty")

    @property
    def moment(self) -> str:
        """When it was measured, by which results are in order; nothing where that is not recorded."""
        return str(self.environment.get("date") or "")

    @property
    def date(self) -> str:
        """The day it was measured."""
        return self.moment[:10] or UNKNOWN

    @property
    def machine(self) -> str:
        """The GPU, or the CPU with its cores."""
        given = self.environment.get("gpu") or self.data.get("machine") or {}
        gpu = given.get("name") or given.get("device") if isinstance(given, dict) else given
        # A result of a CPU may have been measured beside an idle GPU.
        if gpu and self._device != "cpu":
            return str(gpu)
        cpu, cores = self.environment.get("cpu"), self.environment.get("cores")
        return f"{cpu}, {cores} cores" if cpu else self._described()

    @property
    def _device(self) -> Any:
        """Of the file, or of the run's configuration that it holds."""
        config = self.data.get("config")
        return self.data.get("device") or (config.get("device") if isinstance(config, dict) else None)

    def _described(self) -> str:
        """A machine in a file's own words."""
        device = self.data.get("device")
        return device if isinstance(device, str) and device not in ("cpu", "cuda", "mps") else UNKNOWN

    def versions(self, packages: tuple[str, ...] = ()) -> str:
        """Versions of these packages, of all that are recorded where none is named."""
        found = self.environment.get("versions")
        every = found.items() if isinstance(found, dict) else ()
        chosen = [f"{name} {version}" for name, version in every if not packages or name in packages]
        return ", ".join(chosen) or UNKNOWN

    @property
    def commit_text(self) -> str:
        """The commit, short, or those of an experiment's runs; `+` where there were changes beside it."""
        commits = self.environment.get("commits")
        if commits and isinstance(commits, list):
            return ", ".join(map(str, commits))
        return f"{str(self.commit)[:7]}{'+' * bool(self.dirty)}" if self.commit else UNKNOWN


@dataclass(frozen=True)
class Result(Source):
    """A file that a case of `python -m benchmarks` wrote."""

    rows: tuple[Measurement, ...] = ()

    @property
    def case(self) -> str:
        """The case's name."""
        return self.data["case"]

    @property
    def conditions(self) -> dict[str, Any]:
        """What was chosen."""
        return self.data["conditions"]

    @property
    def cut_short(self) -> bool:
        """Whether rows were left out because the time was up."""
        return cut_short(self.conditions)

    @property
    def standing(self) -> tuple[bool, str]:
        """Higher for what is taken before others of its kind: whole ones, then newer ones."""
        return not self.cut_short, self.moment


def marked(results: Iterable[Result]) -> Callable[[Result], str]:
    """What tells a result's machine from the others' behind a name: ` (CPU)`, and a GPU's name where there are two."""
    gpus = {result.machine for result in results if result.data["device"] != "cpu"}
    names = {gpu: gpu.removeprefix("NVIDIA ") for gpu in gpus}
    models = {gpu: name.partition(" ")[0] for gpu, name in names.items()}
    if len(set(models.values())) == len(gpus):  # the memory of an H100 tells nothing more, and rows are short of room
        names = models

    def mark(result: Result) -> str:
        if result.data["device"] == "cpu":
            return " (CPU)"
        return f" ({names[result.machine]})" if len(gpus) > 1 else ""

    return mark


@dataclass(frozen=True)
class Folder:
    """What a folder holds.

    Attributes:
        results: those of `python -m benchmarks`.
        others: JSON of other kinds.
        unread: a file's name, and why nothing of it is shown.
        experiments: those of `python -m benchmarks`.

    """

    results: tuple[Result, ...]
    others: tuple[Source, ...]
    unread: tuple[tuple[str, str], ...]
    experiments: tuple[Source, ...] = ()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have and no bench or experiment writes")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); measure the case again or remove the file") from None


def _result(path: Path) -> Result:
    data = read_result(path)
    try:
        rows = tuple(Measurement.of(row) for row in data["rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: a row is not whole ({type(error).__name__}: {error}), expected name, timing, floor, over_floor "
            "and extra; measure the case again or remove the file"
        ) from None
    if not rows:
        raise ConfigError(f"{path}: no rows, expected at least one; measure the case again or remove the file")
    return Result(path.name, data, rows)


def _kind(data: Any) -> str:
    if not isinstance(data, dict):
        return f"a JSON {type(data).__name__}, expected an object"
    if "experiment" in data:
        return "experiment"
    if (schema := data.get("schema", SCHEMA)) != SCHEMA:
        return f"schema {schema!r}, expected {SCHEMA}"
    return "result" if "schema" in data else "other"


def read_folder(folder: Path) -> Folder:
    """Read every `*.json` of a folder.

    Raises:
        ConfigError: if there is none, or one is not JSON or not whole; the message names the folder or the file.

    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(
            f"{folder}: no *.json there; run `python -m benchmarks ... --out {folder}`, or name --results"
        )
    results, others, unread, experiments = [], [], [], []
    for path in paths:
        kind = _kind(data := _json(path))
        if kind == "result":
            results.append(_result(path))
        elif kind == "experiment":
            experiments.append(Source(path.name, check_experiment(data, path)))
        elif kind == "other":
            others.append(Source(path.name, data))
        else:
            unread.append((path.name, kind))
    return Folder(tuple(results), tuple(others), tuple(unread), tuple(experiments))

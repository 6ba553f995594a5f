"""Results as JSON, one file a case and machine, raw samples kept."""

import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.budget import NO_TIME
from benchmarks.harness.environment import machine_slug, slug
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings, Floor
from fullstride.measure.timing import Timing
from fullstride.runs.atomic_files import replace_file

SCHEMA = 1
WIDTH = 100  # of a printed result
# Conditions that stand in a file's name.
NAMING = (
    "model", "precision", "kv_cache_dtype", "backend", "section", "kernels", "mode", "step", "memory_order",
    "rows", "at",
)  # fmt: skip
KEYS: dict[str, type] = {
    "case": str, "device": str, "conditions": dict, "gate": dict, "environment": dict, "ceilings": dict, "rows": list,
}  # fmt: skip


def at(**settings: tuple[Any, Any]) -> dict[str, str]:
    """The condition that gives a result of other settings than the usual ones a file of its own, or nothing.

    Args:
        settings: of each the value, or several, and the usual one.

    """
    other = {name: value for name, (value, usual) in settings.items() if value != usual}
    return {"at": slug(" ".join(f"{name} {_words(value)}" for name, value in other.items()))} if other else {}


def _words(value: Any) -> str:
    if value is True:
        return ""  # its name says it
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none"


def cut_short(conditions: Mapping[str, Any]) -> bool:
    """Whether rows were left out because the time was up."""
    left_out = conditions.get("left_out")
    return isinstance(left_out, list) and any(isinstance(e, dict) and e.get("why") == NO_TIME for e in left_out)


@dataclass(frozen=True)
class Row:
    """One measured function.

    Attributes:
        name: what it is.
        timing: its times.
        floor: its roofline bound.
        extra: anything else worth keeping, JSON-serialisable.

    """

    name: str
    timing: Timing
    floor: Floor
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def over_floor(self) -> float:
        """Median time over the roofline bound."""
        return self.floor.compare(self.timing).ratio

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "name": self.name,
            "timing": self.timing.to_dict(),
            "floor": self.floor.to_dict(),
            "over_floor": self.over_floor,
            "extra": self.extra,
        }


@dataclass(frozen=True)
class CaseResult:
    """A case run once on one machine.

    Attributes:
        case: its name, such as `meanflow-step`.
        device: cpu, cuda or mps.
        conditions: everything that was chosen: sizes, precision, backend.
        gate: relative errors of what was timed against its reference.
        ceilings: rates measured in the same run.
        rows: the measurements.
        environment: see `environment.environment`.

    """

    case: str
    device: str
    conditions: dict[str, Any]
    gate: dict[str, float]
    ceilings: Ceilings
    rows: list[Row]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "schema": SCHEMA,
            **{key: getattr(self, key) for key in KEYS},
            "ceilings": vars(self.ceilings),
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        """The table that a bench prints."""
        from benchmarks.harness.table import result_table

        text = io.StringIO()
        console = Console(file=text, width=WIDTH)
        console.print(result_table(self))
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

    @property
    def file_name(self) -> str:
        """`case--conditions--machine.json`, the conditions being those that make a file of their own.

        What was cut short has one, too, as it would take the place of a whole one.
        """
        parts = [self.case, *(str(v) for k, v in self.conditions.items() if k in NAMING)]
        parts += ["cut-short"] * cut_short(self.conditions)
        return "--".join([*parts, machine_slug(self.device, self.environment)]) + ".json"


def write_result(result: CaseResult, folder: Path) -> Path:
    """Write the result atomically, replacing an older one of the same case and machine.

    Raises:
        ConfigError: if it has no rows; the older file stays.
        ValueError, TypeError: if a number is not finite or a value is none of JSON's; likewise.

    """
    if not result.rows:
        raise ConfigError(
            f"{result.case}: no row was measured, expected one; {folder / result.file_name} was not written. Give more "
            "time or other rows"
        )
    return write_json(result.to_dict(), folder / result.file_name)


@contextmanager
def written_first(result: CaseResult, folder: Path) -> Iterator[str]:
    """Write a result before it is shown and judged within, so that neither can lose it.

    Yields:
        What became of it, in words.

    Raises:
        ConfigError: afterwards, if it has no rows and nothing else was wrong; see `write_result`.

    """
    yield f"written to {write_result(result, folder)}" if result.rows else "nothing was written"
    if not result.rows:
        write_result(result, folder)  # which says why


def write_json(content: dict[str, Any], path: Path) -> Path:
    """Write numbers whole, or leave the older file; see `write_result`."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return path


def read_result(path: Path) -> dict[str, Any]:
    """A written result.

    Raises:
        ConfigError: if there is none, or it is no result, of another schema, or not whole.

    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a result that `python -m benchmarks` wrote") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); measure the case again") from None
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{path}: schema {schema!r}, expected {SCHEMA}; measure the case again")
    check_keys(result, KEYS, path, "measure the case again")
    return result


def check_keys(data: dict[str, Any], kinds: Mapping[str, type], path: Path, remedy: str) -> None:
    """Whether a file has every key, and there what its writer puts there.

    Raises:
        ConfigError: if not, with what to do.

    """
    if missing := [key for key in kinds if key not in data]:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; {remedy}")
    for key, kind in kinds.items():
        if not isinstance(data[key], kind):
            found = type(data[key]).__name__
            raise ConfigError(f"{path}: {key} is of type {found}, expected {kind.__name__}; {remedy}")


def finite(value: Any) -> float:
    """A number of a file as it is written; TypeError or ValueError for what is none, a string of digits too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)

"""Results as JSON: one file per case and machine, with raw samples."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.budget import NO_TIME
from benchmarks.harness.environment import machine_slug, seconds, slug
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing
from fullstride.runs.atomic_files import replace_file

SCHEMA = 1
# Conditions that stand in a file's name.
NAMING = (
    "model", "precision", "quantize", "kv_cache_dtype", "backend", "section", "kernels", "mode", "step", "memory_order",
    "rows", "at",
)  # fmt: skip
KEYS: dict[str, type] = {
    "case": str, "device": str, "conditions": dict, "gate": dict, "environment": dict, "ceilings": dict, "rows": list,
}  # fmt: skip


def at(**settings: tuple[Any, Any]) -> dict[str, str]:
    """Return the condition that gives a result with non-default settings its own file, or nothing.

    Settings are a value, or several, and its default.
    """
    words = []
    for name, (value, usual) in settings.items():
        if value != usual:
            several = " ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none"
            words.append(name if value is True else f"{name} {several}")  # of a switch its name says it
    return {"at": slug(" ".join(words))} if words else {}


def cut_short(conditions: Mapping[str, Any]) -> bool:
    """Return whether rows were left out because the time was up."""
    left_out = conditions.get("left_out")
    return isinstance(left_out, list) and any(isinstance(e, dict) and e.get("why") == NO_TIME for e in left_out)


@dataclass(frozen=True)
class Row:
    """Row of a result: one measured function."""

    name: str  # what it is
    timing: Timing  # its times
    floor: RooflineBound  # its roofline bound
    extra: dict[str, Any] = field(default_factory=dict)  # anything else worth keeping, JSON-serialisable

    @property
    def over_floor(self) -> float:
        """Median time divided by the roofline bound."""
        return self.floor.compare(self.timing).ratio

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {
            "name": self.name,
            "timing": self.timing.to_dict(),
            "floor": self.floor.to_dict(),
            "over_floor": self.over_floor,
            "extra": self.extra,
        }


@dataclass(frozen=True)
class CaseResult:
    """Result of a case on one machine."""

    case: str  # its name, such as `meanflow-step`
    device: str  # cpu, cuda or mps
    conditions: dict[str, Any]  # everything that was chosen: sizes, precision, backend
    gate: dict[str, float]  # relative errors of what was timed against its reference
    ceilings: Ceilings  # rates measured in the same run
    rows: list[Row]  # the measurements
    environment: dict[str, Any]  # see `environment.environment`

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {
            "schema": SCHEMA,
            **{key: getattr(self, key) for key in KEYS},
            "ceilings": vars(self.ceilings),
            "rows": [row.to_dict() for row in self.rows],
        }

    @property
    def file_name(self) -> str:
        """`case--conditions--machine.json`, the conditions being those that make a file of their own.

        A result that was cut short has its own file, too, because it would replace a whole one.
        """
        parts = [self.case, *(str(v) for k, v in self.conditions.items() if k in NAMING)]
        parts += ["cut-short"] * cut_short(self.conditions)
        return "--".join([*parts, machine_slug(self.device, self.environment)]) + ".json"


def write_result(result: CaseResult, folder: Path) -> Path:
    """Write the result and the seconds that it took, atomically, in place of an older one of this case and machine.

    ConfigError if it has no rows; the older file stays. ValueError, TypeError if a number is not finite or a value is
    not valid JSON; the older file stays, too.
    """
    if not result.rows:
        raise ConfigError(
            f"{result.case}: no row was measured, expected one; {folder / result.file_name} was not written. Give more "
            "time or select other rows"
        )
    content = result.to_dict()
    content["environment"] = result.environment | {"seconds": seconds()}
    return write_json(content, folder / result.file_name)


def write_json(content: dict[str, Any], path: Path) -> Path:
    """Write numbers atomically, or keep the older file; see `write_result`."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return path


def read_result(path: Path) -> dict[str, Any]:
    """Read a result; ConfigError if it is absent, no result, of another schema, or incomplete."""
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
    """Check that a file has every key with a value of its writer's type; ConfigError with the remedy if not."""
    if missing := [key for key in kinds if key not in data]:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; {remedy}")
    for key, kind in kinds.items():
        if not isinstance(data[key], kind):
            found = type(data[key]).__name__
            raise ConfigError(f"{path}: {key} is of type {found}, expected {kind.__name__}; {remedy}")


def finite(value: Any) -> float:
    """Return a number of a file; TypeError or ValueError for anything else, strings of digits included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)

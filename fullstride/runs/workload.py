"""Which workload a run's folder is of, by its configuration: runs of all workloads may lie in one output_dir."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError

CONFIG = "config.json"
TITLES = {"meanflow": "MeanFlow", "bert": "BERT"}
# A key that each workload's configuration has, and no other's.
MARKS = {"meanflow": "epochs", "bert": "steps"}


def run_config(folder: Path) -> dict[str, Any]:
    """The configuration that a run left in its folder, empty without one: weights have a config.json, too."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"output_dir", "run_name"} <= found.keys() else {}


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The workload that a run's configuration is of: a name in `TITLES`, or None."""
    return next((kind for kind, mark in MARKS.items() if mark in config), None)


def check_kind(run: Path, kind: str | None) -> None:
    """Raise if `run` belongs to another workload than `kind`; None is an unknown one.

    Raises:
        ConfigError: naming the folder and both workloads.

    """
    found = kind_of(run_config(run))
    if found is None or kind is None or found == kind:
        return
    raise ConfigError(f"{run} is a {TITLES[found]} run, not a {TITLES[kind]} run; expected another folder or run_name")

"""A run that goes on: which of its settings may be others than those it was saved with, and a refusal of the rest."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.settings.overrides import flat

# Keys and groups of every workload: how often, where to and from, how it is scored; never what is learned.
FREE = {
    "data.path", "eval_every", "evaluation", "keep", "log_every", "output_dir", "overwrite", "resume", "run_name",
    "save_every",
}  # fmt: skip


def changes(saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Set[str]) -> dict[str, str]:
    """The keys by which a run of `saved` cannot go on with `wanted`, each with both values, as in `0 -> 1`.

    Args:
        saved: nested settings that the run was saved with.
        wanted: those that it is to go on with.
        free: keys and groups that may change.

    """
    old, new = dict(flat(saved)), dict(flat(wanted))
    kept = [key for key in old | new if not {key, key.split(".")[0]} & free]
    return {key: f"{old.get(key)} -> {new.get(key)}" for key in kept if old.get(key) != new.get(key)}


def refuse(place: Path, found: Mapping[str, str], what: str = "settings") -> None:
    """Refuse to go on with other settings, or other data.

    Raises:
        ConfigError: naming every key that differs, with both values, if there is one.

    """
    if found:
        named = ", ".join(f"{key}: {values}" for key, values in found.items())
        raise ConfigError(f"{place}: cannot resume with other {what} ({named}); use another run_name")

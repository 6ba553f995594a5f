"""What a run of `fullstride.bert.experiment` has written down before it trained: times, steps, and its settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullstride.bert.overrides import flat
from fullstride.bert.settings import TrainSettings
from fullstride.errors import ConfigError

OVERHEAD = "overhead.json"
# Settings that no number of a result depends on, or that follow from the minutes and the pace.
FREE = {
    "steps", "eval_every", "save_every", "keep", "log_every", "run_name", "output_dir", "resume", "overwrite",
    "data.path", "evaluation.batch_size",
}  # fmt: skip


def recipe_of(settings: TrainSettings) -> dict[str, Any]:
    """What the numbers of a run depend on, by dotted keys."""
    return {key: value for key, value in flat(asdict(settings)) if key not in FREE}


def read_begun(run: Path, settings: TrainSettings) -> dict[str, Any]:
    """The times and the number of steps of a run that is to be one with these settings.

    Args:
        run: its folder.
        settings: that are asked for; those that only one of the two knows are of other code, as are runs without any.

    Raises:
        ConfigError: if it was begun with others, naming all that differ.

    """
    begun = json.loads((run / OVERHEAD).read_text())
    known, asked = begun.get("recipe", {}), recipe_of(settings)
    if other := [f"{key}={known[key]}" for key in known if key in asked and known[key] != asked[key]]:
        raise ConfigError(f"{run}: was begun with {' '.join(other)}; give the same, or other --runs")
    return begun

"""Records that a run of the BERT experiment writes before it trains: times, steps, and its settings."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.run_provenance import expect_recipe
from fullstride.bert.training.settings import TrainSettings
from fullstride.runs.atomic_files import read_kept
from fullstride.settings.overrides import flat

OVERHEAD = "overhead.json"
# Settings that no number of a result depends on, or that follow from the minutes and the pace.
FREE = {
    "steps", "eval_every", "save_every", "keep", "log_every", "run_name", "output_dir", "resume", "overwrite",
    "evaluation.batch_size",
}  # fmt: skip
# Texts that are the same wherever they lie; a path of others says which they are.
SAME_ANYWHERE = {"gcide", "python_docs"}


def recipe_of(settings: TrainSettings) -> dict[str, Any]:
    """What the numbers of a run depend on, by dotted keys."""
    free = FREE | ({"data.path"} if settings.data.name in SAME_ANYWHERE else set())
    return {key: value for key, value in flat(asdict(settings)) if key not in free}


def read_begun(run: Path, settings: TrainSettings) -> dict[str, Any]:
    """The times and the number of steps of a run that is to be one with these settings.

    Args:
        run: its folder.
        settings: that are asked for.

    Raises:
        ConfigError: if it was begun with others, naming all that differ, or its file is not whole.

    """
    begun = read_kept(run / OVERHEAD)
    expect_recipe(begun, recipe_of(settings), run)
    return begun

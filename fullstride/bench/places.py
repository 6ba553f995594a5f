"""Where results go unless told."""

from collections.abc import Sequence
from pathlib import Path

RESULTS = Path("benchmarks/results")


def results_folder(out: Path | None, scale: str, runs: Path, overrides: Sequence[str] = ()) -> Path:
    """Where an experiment's result goes.

    A smoke test's is no evidence, and that of other settings would take the place of an experiment's own: both stay out
    of the folder of results.

    Args:
        out: as it was told; None if it was not.
        scale: of the experiment.
        runs: the folder of its runs.
        overrides: settings that are not the experiment's own.

    """
    return out or (runs / "results" if scale == "smoke" or overrides else RESULTS)

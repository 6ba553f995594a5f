"""The checkpoints of a run: which there are, which of them to go on from, and which may go."""

import shutil
from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.format import (
    MANIFEST,
    PREFIX,
    REMOVING,
    REPLACED,
    WRITING,
    make_way,
    read_manifest,
    verify,
)
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.runs.atomic_files import note
from fullstride.runs.folder import open_folder
from fullstride.runs.workload import check_kind


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too: a half-written one has another name.

    So has a copy that somebody put beside it, which is neither gone on from nor removed.
    """
    found = (run / "checkpoints").glob(f"{PREFIX}*")
    # By number: names of more than eight digits are longer.
    return sorted((p for p in found if p.is_dir() and p.name.removeprefix(PREFIX).isdecimal()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def newest_whole(run: Path, *, good: bool = False) -> Path | None:
    """The newest checkpoint of a run that is whole; each damaged one is refused by name on stderr.

    Args:
        run: its folder.
        good: pass over those that a stop or the end saved among harmful steps.

    Raises:
        ConfigError: if there are checkpoints and all are damaged.

    """
    damaged = []
    for path in reversed(checkpoints(run)):
        try:
            verify(path)
        except ConfigError as error:
            note(f"refused: {error}")
            damaged.append(path.name)
        else:
            if not good or not read_manifest(path).get("harmful"):
                return path
    if damaged and not good:
        raise ConfigError(f"{run}: every checkpoint is damaged ({', '.join(damaged)}); start anew with overwrite=true")
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest whole one of the run at `path`.

    Raises:
        ConfigError: if there is none, or the run is of another workload.

    """
    if (path / MANIFEST).is_file():
        return path
    if found := newest_whole(path):
        return found
    check_kind(path, "meanflow")
    raise ConfigError(
        f"{path}: no checkpoint here; expected a run's folder (runs/NAME) or a checkpoint's (.../checkpoints/{PREFIX}*)"
    )


def open_run(config: TrainConfig) -> tuple[Path, Path | None]:
    """The folder of a run, made if need be, and the checkpoint to go on from, if any.

    Raises:
        ConfigError: as `fullstride.runs.folder.open_folder`, or if the run is to be resumed and all its checkpoints are
            damaged.

    """
    run = open_folder(config)
    tidy(run / "checkpoints")
    return run, newest_whole(run) if config.resume else None


def tidy(folder: Path) -> None:
    """Finish what a killed process left: half-written and half-removed checkpoints go, one half-replaced returns."""
    for old in folder.glob(f"{REPLACED}*"):
        final = folder / old.name.removeprefix(REPLACED)
        if not final.exists():
            old.rename(final)
    for prefix in (WRITING, REMOVING, REPLACED):
        for left in folder.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def keep_newest(run: Path, count: int, newest: Path) -> None:
    """Remove all but `newest` and the `count` - 1 before it; 0 keeps all.

    Later ones were found damaged when the run went on from before them: they do not count and stay for a look.
    """
    for path in [p for p in checkpoints(run) if _step(p) <= _step(newest)][: -count or None] if count else []:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint."""
    hidden = checkpoint.with_name(REMOVING + checkpoint.name)
    make_way(checkpoint, hidden)  # a half-removed folder must not look like a checkpoint
    shutil.rmtree(hidden, ignore_errors=True)


def remove_later(run: Path, checkpoint: Path) -> None:
    """Remove a run's checkpoints after one of them, so that none is gone on from."""
    for later in [path for path in checkpoints(run) if _step(path) > _step(checkpoint)]:
        remove(later)

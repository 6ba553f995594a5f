"""Modal volumes: list checkpoints, fetch runs and their tracking files."""

import os
import re
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import modal

from fullstride.errors import ConfigError
from fullstride.launch.modal_refusals import refusals
from fullstride.runs.atomic_files import is_folder_name, note

SYNCED = ".synced_from"
# Below a checkpoint's folder, of MeanFlow's and of orbax's.
SEALS = {("manifest.json",), ("commit_success.txt",)}


@dataclass(frozen=True)
class VolumeFile:
    """File on a volume: its path there, bytes, seconds since 1970."""

    path: PurePosixPath
    size: int
    mtime: int


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint on a volume; `whole` if the file that is written last exists: its manifest, or orbax's."""

    run: str
    name: str
    size: int
    mtime: int
    whole: bool


def files_of(volume: modal.Volume, run: str | None) -> list[VolumeFile]:
    """List the files of a volume, or of one run there; hidden ones are unfinished and left out.

    Raises:
        ConfigError: if there is no such volume or run.

    """
    with refusals():
        entries = list(volume.iterdir(f"/{run or ''}", recursive=True))
    found = [
        VolumeFile(PurePosixPath(entry.path.lstrip("/")), entry.size, entry.mtime)
        for entry in entries
        if entry.type.name == "FILE"
    ]
    return [file for file in found if not any(part.startswith(".") for part in file.path.parts)]


def checkpoints_on(volume: modal.Volume, run: str | None = None) -> list[Checkpoint]:
    """Return the checkpoints of all runs on a volume, or of one, oldest step first."""
    grouped: dict[tuple[str, str], list[VolumeFile]] = {}
    for file in files_of(volume, run):
        match file.path.parts:
            case (owner, "checkpoints", name, _, *_):
                grouped.setdefault((owner, name), []).append(file)
    return [
        Checkpoint(
            owner,
            name,
            sum(file.size for file in files),
            max(file.mtime for file in files),
            any(file.path.parts[3:] in SEALS for file in files),
        )
        for (owner, name), files in sorted(grouped.items(), key=lambda item: _order(*item[0]))
    ]


def _order(run: str, checkpoint: str) -> tuple[str, int, str]:
    """Return a sort key: the run, then the step that a checkpoint's name ends in."""
    step = re.search(r"\d+$", checkpoint)
    return run, int(step[0]) if step else -1, checkpoint


def lines_of(checkpoints: list[Checkpoint]) -> list[str]:
    """Format checkpoints as lines: run, name, MiB, time, and whether it is whole."""
    return [
        f"{c.run}  {c.name}  {c.size / 2**20:.1f} MiB  {datetime.fromtimestamp(c.mtime, UTC):%Y-%m-%d %H:%M:%S} UTC"
        + ("" if c.whole else "  incomplete")
        for c in checkpoints
    ]


def sync(volume: modal.Volume, name: str, out: Path, run: str | None = None) -> tuple[int, int]:
    """Fetch what is new or changed on a volume.

    Files that were removed there stay here; each file is replaced atomically.

    Args:
        volume: the volume.
        name: name of the volume, which is noted in each folder that this makes.
        out: folder for its folders and files.
        run: name of the only run to fetch.

    Returns:
        Number of files and bytes fetched.

    Raises:
        ConfigError: if a folder of that name is here already and no earlier sync has made it.

    """
    if run is not None and not is_folder_name(run):
        raise ConfigError(f"--run {run}: expected a run's name")
    files = files_of(volume, run)
    # A file that lies in no folder there belongs to all of `out`.
    _claim({out / file.path.parts[0] if len(file.path.parts) > 1 else out for file in files}, name)
    fetched = [file for file in files if _differs(out, file) and _fetch(volume, file, out)]
    return len(fetched), sum(file.size for file in fetched)


def _claim(folders: set[Path], name: str) -> None:
    """Mark folders as a volume's, unless one of them is something else already."""
    for folder in folders:
        mark = folder / SYNCED
        if folder.exists() and not (mark.is_file() and mark.read_text().strip() == name):
            raise ConfigError(f"{folder} exists and was not fetched from {name}; choose another folder")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SYNCED).write_text(f"{name}\n")


def _differs(out: Path, file: VolumeFile) -> bool:
    try:
        here = (out / file.path).stat()
    except FileNotFoundError:
        return True
    return (here.st_size, int(here.st_mtime)) != (file.size, file.mtime)


def _fetch(volume: modal.Volume, file: VolumeFile, out: Path) -> bool:
    """Fetch a file; return False if it is gone, such as a checkpoint that newer ones have replaced."""
    path = out / file.path
    if not path.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{file.path}: expected a path within the volume")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=".writing_", dir=path.parent)
    try:
        with refusals(), os.fdopen(handle, "wb") as stream:
            for chunk in volume.read_file(str(file.path)):
                stream.write(chunk)
        os.chmod(part, 0o644)
        os.utime(part, (file.mtime, file.mtime))
        os.replace(part, path)
    except FileNotFoundError:
        note(f"{file.path}: removed meanwhile")
        return False
    finally:
        Path(part).unlink(missing_ok=True)
    return True

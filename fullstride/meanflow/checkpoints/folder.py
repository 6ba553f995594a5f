"""The checkpoints of a run: their list, the one to resume from, and the removal of old ones.

One folder each: tensors in safetensors, everything else in a JSON manifest with checksums. A checkpoint is written
next to its final name and renamed, so a folder of that name is always complete; reading verifies every file against the
manifest, and the manifest against itself.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.runs.atomic_files import file_sha256, note
from fullstride.runs.folder import REMOVING, check_kind, open_folder, remove_folder
from fullstride.step.torch import Pace

MANIFEST = "manifest.json"
FORMAT = 2
PREFIX = "step_"
WRITING, REPLACED = ".writing_", ".replaced_"

Tensors = dict[str, Tensor]


def ema_group(decay: Pace) -> str:
    """The checkpoint's file of an average."""
    # Every digit: two averages must not share a file.
    return f"ema_{decay!r}"


def _flush(path: Path) -> None:
    """Flush a file or folder to disk before anything refers to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest's content, whatever its layout."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_checkpoint(folder: Path, step: int, groups: dict[str, Tensors], manifest: dict[str, Any]) -> Path:
    """Write `folder`/step_XXXXXXXX atomically.

    Args:
        folder: the run's folder of checkpoints.
        step: optimizer steps made.
        groups: tensors of each safetensors file, by its name: model, ema, optimizer, rng, ...
        manifest: JSON-serialisable; stored with the format and the files' checksums.

    Returns:
        The checkpoint's folder. An older one of the same step is replaced.

    Raises:
        OSError: if it cannot be written, as on a full disk; every earlier checkpoint is still there.

    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{PREFIX}{step:08d}"
    part = Path(tempfile.mkdtemp(prefix=WRITING, dir=folder))
    try:
        files = {}
        for name, tensors in groups.items():
            path = part / f"{name}.safetensors"
            save_tensors(tensors, path)
            files[path.name] = file_sha256(path)
        content = json.loads(json.dumps({"format": FORMAT, "step": step, "files": files} | manifest))
        (part / MANIFEST).write_text(json.dumps(content | {"seal": _seal(content)}, indent=1) + "\n")
        for path in [*part.iterdir(), part]:
            _flush(path)
        part.chmod(0o755)
        for path in part.iterdir():
            path.chmod(0o644)  # safetensors lets nobody else read
        old = folder / f"{REPLACED}{final.name}"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)  # left of a removal that did not succeed
            final.rename(old)
        part.rename(final)
        _flush(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write one safetensors file.

    Raises:
        OSError: if it cannot be written.

    """
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(f"{path}: {error}") from error


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's folder.

    Raises:
        ConfigError: if there is none, it was altered, or it is of another format.

    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{checkpoint}: no {MANIFEST}; expected the folder of a checkpoint, such as runs/demo")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); the checkpoint is damaged, use an older one") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise ConfigError(f"{path}: format {found!r}, this version reads {FORMAT}")
    seal = manifest.pop("seal", None)
    if seal != _seal(manifest):
        raise ConfigError(f"{path}: its content does not match its checksum; it was altered, use an older checkpoint")
    return manifest


def _whole(checkpoint: Path, file: str) -> Path:
    """The path of a checkpoint's file whose checksum is right."""
    path, files = checkpoint / file, read_manifest(checkpoint)["files"]
    if file not in files:
        raise ConfigError(f"{checkpoint}: no {file}; it holds {', '.join(files)}")
    if not path.is_file():
        raise ConfigError(f"{path}: the file is gone; the checkpoint is damaged, use an older one")
    if (found := file_sha256(path)) != files[file]:
        raise ConfigError(
            f"{path}: sha256 {found[:12]}..., expected {files[file][:12]}...; the file is damaged, use an older one"
        )
    return path


def read_group(checkpoint: Path, name: str) -> Tensors:
    """One safetensors file of a checkpoint, on the CPU, its checksum verified.

    Raises:
        ConfigError: if the file is missing or differs from what was written.

    """
    return load_file(_whole(checkpoint, f"{name}.safetensors"))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too: a half-written one has another name.

    A copy under another name next to them is neither resumed from nor removed.
    """
    found = (run / "checkpoints").glob(f"{PREFIX}*")
    # By number: names of more than eight digits are longer.
    return sorted((p for p in found if p.is_dir() and p.name.removeprefix(PREFIX).isdecimal()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def newest_whole(run: Path, *, good: bool = False) -> Path | None:
    """The newest intact checkpoint of a run; each damaged one is named on stderr.

    Args:
        run: the run's folder.
        good: skip checkpoints that a stop or the end saved among harmful steps.

    Raises:
        ConfigError: if there are checkpoints and all are damaged.

    """
    damaged = []
    for path in reversed(checkpoints(run)):
        try:
            for file in read_manifest(path)["files"]:
                _whole(path, file)
        except ConfigError as error:
            note(f"refused: {error}")
            damaged.append(path.name)
        else:
            if not good or not read_manifest(path).get("harmful"):
                return path
    if damaged and not good:
        raise ConfigError(f"{run}: every checkpoint is damaged ({', '.join(damaged)}); start again with overwrite=true")
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest intact one of the run at `path`.

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
    """The folder of a run, created if needed, and the checkpoint to resume from, if any.

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

    Later ones were found damaged when the run resumed from before them: they do not count and stay for inspection.
    """
    for path in [p for p in checkpoints(run) if _step(p) <= _step(newest)][: -count or None] if count else []:
        remove_folder(path)


def remove_later(run: Path, checkpoint: Path) -> None:
    """Remove a run's checkpoints after one of them, so that none of them is resumed from."""
    for later in [path for path in checkpoints(run) if _step(path) > _step(checkpoint)]:
        remove_folder(later)

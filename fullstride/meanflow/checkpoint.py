"""Checkpoints: one folder each, tensors in safetensors, everything else in a JSON manifest with checksums.

A checkpoint is written beside its final name and renamed, so a folder of that name is always whole; reading verifies
every file against the manifest.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fullstride.errors import ConfigError

MANIFEST = "manifest.json"
FORMAT = 1
PREFIX = "step_"

Tensors = dict[str, Tensor]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk before anything refers to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(folder: Path, step: int, groups: dict[str, Tensors], manifest: dict[str, Any]) -> Path:
    """Write `folder`/step_XXXXXXXX atomically.

    Args:
        folder: the run's folder of checkpoints.
        step: optimizer steps made.
        groups: a safetensors file each, by name: model, ema, optimizer, rng, ...
        manifest: JSON-serialisable; stored with the format and the files' checksums.

    Returns:
        The checkpoint's folder. An older one of the same step is replaced.

    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{PREFIX}{step:08d}"
    part = Path(tempfile.mkdtemp(prefix=".writing_", dir=folder))
    try:
        files = {}
        for name, tensors in groups.items():
            path = part / f"{name}.safetensors"
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)
            files[path.name] = _sha256(path)
        text = json.dumps({"format": FORMAT, "step": step, "files": files} | manifest, indent=1)
        (part / MANIFEST).write_text(text + "\n")
        for path in [*part.iterdir(), part]:
            _flush(path)
        part.chmod(0o755)
        old = part.with_name(part.name + ".old")
        if final.exists():
            final.rename(old)
        part.rename(final)
        _flush(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's folder.

    Raises:
        ConfigError: if there is none or it is of another format.

    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{checkpoint}: no {MANIFEST}; expected the folder of a checkpoint, such as runs/demo")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); the checkpoint is damaged, use an older one") from None
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT}")
    return manifest


def read_group(checkpoint: Path, name: str) -> Tensors:
    """One safetensors file of a checkpoint, on the CPU, its checksum verified.

    Raises:
        ConfigError: if the file is missing or differs from what was written.

    """
    file, files = f"{name}.safetensors", read_manifest(checkpoint)["files"]
    path = checkpoint / file
    if file not in files or not path.is_file():
        raise ConfigError(f"{checkpoint}: no {file}; it holds {', '.join(files)}")
    if (found := _sha256(path)) != files[file]:
        raise ConfigError(
            f"{path}: sha256 {found[:12]}..., expected {files[file][:12]}...; the file is damaged, use an older one"
        )
    return load_file(path)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; half-written ones do not count."""
    return sorted(p for p in (run / "checkpoints").glob(f"{PREFIX}*") if (p / MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest of the run at `path`.

    Raises:
        ConfigError: if there is none.

    """
    if (path / MANIFEST).is_file():
        return path
    if found := checkpoints(path):
        return found[-1]
    raise ConfigError(
        f"{path}: no checkpoint here; expected a run's folder (runs/NAME) or a checkpoint's (.../checkpoints/{PREFIX}*)"
    )

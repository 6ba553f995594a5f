"""Checkpoints: one folder each, tensors in safetensors, everything else in a JSON manifest with checksums.

A checkpoint is written beside its final name and renamed, so a folder of that name is always whole; reading verifies
every file against the manifest, and the manifest against itself.
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
from fullstride.runs.atomic_files import file_sha256

MANIFEST = "manifest.json"
FORMAT = 2
PREFIX = "step_"
WRITING, REMOVING, REPLACED = ".writing_", ".removing_", ".replaced_"

Tensors = dict[str, Tensor]


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk before anything refers to it."""
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
        groups: a safetensors file each, by name: model, ema, optimizer, rng, ...
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
            make_way(final, old)
        part.rename(final)
        _flush(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def make_way(checkpoint: Path, hidden: Path) -> None:
    """Rename a checkpoint; what lies under the new name is left of a removal that did not succeed, and goes first.

    Raises:
        OSError: if it cannot be renamed.

    """
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)


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
        raise ConfigError(f"{path}: its content does not match its seal; it was altered, use an older checkpoint")
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


def verify(checkpoint: Path) -> None:
    """Check every file of a checkpoint.

    Raises:
        ConfigError: naming the first that is missing or differs from what was written.

    """
    for file in read_manifest(checkpoint)["files"]:
        _whole(checkpoint, file)

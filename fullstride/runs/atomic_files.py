"""Atomic replacement of files, and best-effort messages on stderr."""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError

WRITING = ".writing_"


def replace_file(path: Path, content: bytes | str) -> None:
    """Write next to `path`, flush to disk and rename: if interrupted, `path` has its old or its new content.

    Raises:
        OSError: if it cannot be written, naming the file; it is as it was before.

    """
    try:
        handle, name = tempfile.mkstemp(prefix=WRITING, dir=path.parent)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error})") from error


def write_best_effort(path: Path, content: bytes | str) -> None:
    """Write to a cache; if it cannot be written, note that and go on: the result is worth more than its copy."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        note(f"{path}: not cached ({error}); set FULLSTRIDE_CACHE to a writable folder")


def read_best_effort(path: Path) -> dict[str, Any]:
    """Read values by name from a JSON file of a run.

    Raises:
        ConfigError: if the file is incomplete or damaged.

    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: incomplete or damaged ({error}); copy it again, or delete it") from None
    if not isinstance(kept, dict):
        raise ConfigError(f"{path}: incomplete or damaged (not a JSON object); copy it again, or delete it")
    return kept


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_size(folder: Path) -> int:
    """The bytes of all files below a folder; links count nothing, nor does what is removed meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                path = Path(place, name)
                size += 0 if path.is_symlink() else path.stat().st_size
    return size


def note(message: str) -> None:
    """Print a line on stderr, if possible: stderr may lie on the very disk that is full."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def is_folder_name(name: str) -> bool:
    """Return whether a folder of this name can only lie directly in its parent."""
    return bool(name.strip()) and name != "." and not any(part in name for part in ("/", "\\", "..", "\0"))

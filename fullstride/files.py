"""Files that are whole or as they were before, and notes that cost nothing where they cannot be written."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Write beside `path`, bring it to the disk and rename: whatever stops this, `path` is whole, old or new.

    Raises:
        OSError: if it cannot be written, naming the file; it is as it was before.

    """
    try:
        handle, name = tempfile.mkstemp(prefix=".writing_", dir=path.parent)
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


def note(message: str) -> None:
    """A line on stderr, if it can be written: it may lie on the very disk whose being full is to be told."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name can only lie directly in the one that it is made in."""
    return bool(name.strip()) and name != "." and not any(part in name for part in ("/", "\\", "..", "\0"))

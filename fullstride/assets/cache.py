"""The cache folder: its entries, their size and age, and their removal.

Only files that fullstride writes are counted and removed: FULLSTRIDE_CACHE may name a folder that holds other things.
No link is followed; a link counts as an empty file, and its removal leaves what it leads to.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from fullstride.assets.fetch import PART, cache_folder
from fullstride.assets.registry import ASSETS
from fullstride.errors import ConfigError, one_of
from fullstride.runs.atomic_files import WRITING
from fullstride.runs.lock import locked

SHA256, SHORT = "[0-9a-f]" * 64, "[0-9a-f]" * 24
UNITS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}


@dataclass(frozen=True)
class EntryKind:
    """A folder of the cache: a description, and `fnmatch` patterns of its files' names."""

    what: str
    names: tuple[str, ...] = ("*",)


# What is computed here; the code that writes to a folder of the cache needs a row.
COMPUTED = {
    "inductor": EntryKind("programs that torch.compile made"),
    "programs": EntryKind("executables of the language models' engine", (f"{SHA256}.bin",)),
    "ptx": EntryKind("CUDA kernels of the language models, compiled", (f"{SHA256}.ptx",)),
    "python_docs": EntryKind("texts of Python's own documentation", (f"{SHORT}.json",)),
    "reference": EntryKind(
        "classifiers and features that samples are scored by",
        (f"{SHA256}.json", f"{SHA256}.safetensors", f".{SHA256}.lock"),
    ),
    "wordpiece": EntryKind("tokenizers trained on a text", (f"{SHORT}.json",)),
    "xla": EntryKind("programs that XLA made"),
}


@dataclass(frozen=True)
class Entry:
    """A folder of the cache that has files of fullstride's.

    Attributes:
        name: name of the folder.
        what: description of its content.
        files: files that fullstride wrote there, links included.
        size: size of all files, in bytes.
        changed: time of the newest file, in seconds since the epoch.

    """

    name: str
    what: str
    files: tuple[Path, ...]
    size: int
    changed: float


def entry_kinds() -> dict[str, EntryKind]:
    """Every folder that fullstride can have in its cache, downloads under way excepted."""
    fetched: dict[str, tuple[str, ...]] = {}
    for name, asset in ASSETS.items():
        folder = name.partition("/")[0]
        fetched[folder] = (*fetched.get(folder, ()), asset.file)
    return COMPUTED | {folder: EntryKind("fetched data or weights", files) for folder, files in fetched.items()}


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """Entries of the cache, sorted by name; of those named, the ones that are there.

    Raises:
        ConfigError: for a name that no entry can have.
        OSError: if a folder cannot be read.

    """
    states = {True: "a download in progress", False: "left by an interrupted download"}
    known = entry_kinds() | {part.name: EntryKind(states[_in_use(part)]) for part in cache_folder().glob(f"{PART}*")}
    for name in names:
        one_of("cache entry", name, known)
    found = (_entry(name, known[name]) for name in sorted(set(names) or known))
    return [entry for entry in found if entry.files]


def _in_use(part: Path) -> bool:
    """True if a process holds the lock of a download's folder; a folder that is gone is of one that ended."""
    with contextlib.suppress(FileNotFoundError), locked(part) as alone:
        return not alone
    return False


def _entry(name: str, kind: EntryKind) -> Entry:
    files, size, changed = [], 0, 0.0
    for file in _walk(cache_folder() / name):
        if not any(fnmatchcase(file.name, pattern) for pattern in (*kind.names, f"{WRITING}*")):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process may have renamed it
            status = file.lstat()
            size += 0 if file.is_symlink() else status.st_size
            changed = max(changed, status.st_mtime)
            files.append(file)
    return Entry(name, kind.what, tuple(files), size, changed)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder, and every link, which is not gone through."""
    if folder.is_symlink():
        yield folder
    elif folder.is_dir():
        for root, folders, files in os.walk(folder, onerror=_fail):
            links = (name for name in folders if (Path(root) / name).is_symlink())
            yield from (Path(root) / name for name in (*files, *links))


def _fail(error: OSError) -> NoReturn:
    raise error


def clear(found: Sequence[Entry]) -> None:
    """Remove the files of entries, and the folders that are empty then.

    Raises:
        ConfigError: if a download is in progress; nothing is removed.
        OSError: if a file cannot be removed.

    """
    for part in cache_folder().glob(f"{PART}*"):
        if _in_use(part):
            raise ConfigError(f"{part}: a download is in progress; nothing was removed, try again when it is done")
    for entry in found:
        for file in entry.files:
            file.unlink(missing_ok=True)
        for root, _, _ in os.walk(cache_folder() / entry.name, topdown=False):
            with contextlib.suppress(OSError):  # it holds something
                os.rmdir(root)


def foreign() -> list[str]:
    """Names in the cache folder that are none of fullstride's."""
    known, folder = entry_kinds(), cache_folder()
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if name not in known and not name.startswith(PART))


def age(changed: float) -> str:
    """Time since then, in whole units, as in `3 d`."""
    seconds = max(time.time() - changed, 0.0)
    unit = next((unit for unit, length in UNITS.items() if seconds >= length), "s")
    return f"{seconds // UNITS[unit]:.0f} {unit}"

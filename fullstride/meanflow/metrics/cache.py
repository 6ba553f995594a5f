"""Tensors and values kept between runs: written atomically, read only if whole.

An entry is KEY.json, which holds the values and names the file of tensors by the sha256 of both. It comes last and by
renaming, so an entry is whole or absent. Of several processes that want one that is absent the first makes it and the
others wait and read it: what each made for itself would differ by its device's rounding.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fullstride.assets.fetch import cache_folder
from fullstride.runs.atomic_files import note, replace_file

Entry = tuple[dict[str, Tensor], dict[str, Any]]


def reference_folder() -> Path:
    """`reference` in $FULLSTRIDE_CACHE, or in the user's cache folder of fullstride."""
    return cache_folder() / "reference"


def cache_key(*parts: str | int | None) -> str:
    """The name of an entry: sha256 over everything its content depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def kept(folder: Path, key: str, make: Callable[[], Entry]) -> Entry:
    """What is kept under `key`; where there is nothing, what `make` returns, kept for the next.

    One process at a time makes it, and no process that finds it waits.
    """
    if (entry := read_entry(folder, key)) is None:
        with alone(folder, key):
            # Another process may have made it in the meantime; of what is damaged it was told.
            if (entry := read_entry(folder, key, quiet=True)) is None:
                entry = make()
                write_entry(folder, key, *entry)
    return entry


@contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """A block in which no other process makes this entry; where there can be no lock, a plain block.

    Unlike the lock of a run's folder, flock's holds between a process's own threads, too.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / f".{key}.lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note(f"{folder}: another process computes what is needed here; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


def _digest(content: bytes, values: Any) -> str:
    digest = hashlib.sha256(content)
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def write_entry(folder: Path, key: str, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Keep tensors and JSON-serialisable values under `key`, in place of what was there.

    Where the folder cannot be written, a note on stderr says so: what was computed is worth more than its copy.
    """
    content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    digest = _digest(content, values)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{digest}.safetensors", content)
        text = json.dumps({"sha256": digest, "values": values}, indent=1)
        replace_file(folder / f"{key}.json", text)
    except OSError as error:
        note(f"{folder}: nothing is kept ({error}); set FULLSTRIDE_CACHE to a folder that can be written")


def read_entry(folder: Path, key: str, quiet: bool = False) -> Entry | None:
    """What is kept under `key`; None if there is nothing, or, with a note unless `quiet`, if it is damaged."""
    path = folder / f"{key}.json"
    if not path.is_file():
        return None
    try:
        entry = json.loads(path.read_bytes())
        content = (folder / f"{entry['sha256']}.safetensors").read_bytes()
        if (found := _digest(content, entry["values"])) != entry["sha256"]:
            raise ValueError(f"sha256 {found[:12]}..., expected {entry['sha256'][:12]}...")
        return load(content), entry["values"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if not quiet:
            note(f"{path}: damaged cache entry ({error}); it is computed anew")
        return None

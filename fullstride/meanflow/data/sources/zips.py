"""Pictures in a zip, as EDM's dataset_tool writes one, read without unpacking it."""

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np

from fullstride.errors import ConfigError, Damaged, one_line
from fullstride.meanflow.data.sources.folders import HALVES
from fullstride.meanflow.data.sources.interface import (
    LABELS,
    LARGEST,
    SUFFIXES,
    Archive,
    check_inside,
    hidden,
    listed_labels,
)

ENCRYPTED = 1  # the flag's bit


class Zip(Archive):
    """A zip of a folder; one around everything in it, as `zip -r` leaves it, is looked through."""

    def __init__(self, path: Path):
        """List what it holds.

        Raises:
            ConfigError: if it is damaged, or a picture is encrypted, too large, there twice, or named as none can be.

        """
        super().__init__(path)
        self._handle: tuple[int, ZipFile] | None = None
        members = _members(path, self._opened().infolist())
        self._around = _around(members)
        self._sizes = {name.removeprefix(self._around): size for name, size in members.items()}

    def listed(self, half: str, names: list[str]) -> tuple[np.ndarray, int] | None:
        """Return the classes of EDM's dataset.json."""
        file = f"{half}/{LABELS}".removeprefix("./")
        return listed_labels(str(self.path / half), self.open(file).read() if file in self._sizes else None, names)

    def open(self, name: str) -> io.BytesIO:
        """A member, unpacked and checked by its checksum; never more than the size it was listed with.

        Raises:
            OSError: if the zip cannot be read at all.
            Damaged: if the member cannot be unpacked.

        """
        try:
            return io.BytesIO(self._opened().read(self._around + name.removeprefix("./")))
        except OSError:
            self._handle = None  # that of a disk that is back is another
            raise
        # Each way of packing has exceptions of its own for damage.
        except Exception as error:
            where = f"{self.path}/{name.removeprefix('./')}"
            raise Damaged(f"{where}: incomplete or damaged ({one_line(error)}); copy or pack the zip again") from None

    def _opened(self) -> ZipFile:
        """A handle of this process: one that a fork shared would be moved by both."""
        if self._handle is None or self._handle[0] != os.getpid():
            try:
                self._handle = os.getpid(), ZipFile(self.path)
            except (BadZipFile, NotImplementedError, ValueError) as error:
                raise ConfigError(f"{self.path}: not a complete zip ({one_line(error)}); copy it again") from None
        return self._handle[1]

    def __getstate__(self) -> dict[str, Any]:
        """Without the handle, too."""
        return super().__getstate__() | {"_handle": None}


def _members(path: Path, listed: Iterable[ZipInfo]) -> dict[str, int]:
    """The sizes of a zip's files, by name; of those that are read, checked."""
    sizes: dict[str, int] = {}
    for info in listed:
        name = info.filename
        if info.is_dir() or hidden(name) or name.startswith("__MACOSX/"):
            continue
        if name.lower().endswith((*SUFFIXES, LABELS)):
            check_inside(path, name)
            faults = {
                "encrypted, expected a zip without password": info.flag_bits & ENCRYPTED,
                f"of {info.file_size:,} bytes unpacked, expected at most {LARGEST:,}": info.file_size > LARGEST,
                "there twice": name in sizes,
            }
            if found := [fault for fault, there in faults.items() if there]:
                raise ConfigError(f"{path}: {name} is {found[0]}; pack the zip again")
        sizes[name] = info.file_size
    return sizes


def _around(names: Iterable[str]) -> str:
    """The only folder at the top, if it is there to hold the zip's files together; else nothing."""
    tops = {name.partition("/")[::2] for name in names}
    first = {top for top, _ in tops}
    if len(first) != 1 or first & set(HALVES) or not any("/" in rest or rest == LABELS for _, rest in tops):
        return ""
    return f"{first.pop()}/"

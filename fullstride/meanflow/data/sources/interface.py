"""Sources of pictures: a folder, or files that hold many pictures each, all of them read by name."""

import io
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import MOST_SHOWN, ConfigError, elided
from fullstride.meanflow.data.sources.edm_labels import LABELS, listed_labels
from fullstride.meanflow.data.sources.folders import file_sizes, halves, list_files, top_folders

SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Bytes of the largest picture that PIL decodes, which is of twice as many pixels as it warns of, in RGB.
LARGEST = 2 * 3 * 89_478_485


class Source(ABC):
    """Pictures by name.

    A name has `/` between its parts, the first of which is `train`, `test` or `val`, or `.` where there are no halves.

    Attributes:
        path: where it lies.
        labels_file: whether labels that no folders say are in a file.

    """

    labels_file = True

    def __init__(self, path: Path):
        self.path = path

    @abstractmethod
    def folders(self) -> list[str]:
        """The folders at its top that are not hidden."""

    @abstractmethod
    def pictures(self, half: str) -> tuple[list[str], int]:
        """The pictures of a half by their names in it, sorted, and the number of other files."""

    @abstractmethod
    def listed(self, half: str, names: list[str]) -> tuple[np.ndarray, int] | None:
        """The class of each picture and the number of classes; None where their folders say it."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The size in bytes of each picture, in sorted order; labels that are a file of their own count as one."""

    def halves(self) -> tuple[str, str | None]:
        """The half that is trained on and the one held out, as `split_folders`."""
        return halves(self.path, self.folders())

    @abstractmethod
    def __truediv__(self, name: str) -> "Path | Member":
        """A picture as a file."""


class Folder(Source):
    """A file for each picture."""

    def folders(self) -> list[str]:
        """Implement `Source`."""
        return top_folders(self.path)

    def pictures(self, half: str) -> tuple[list[str], int]:
        """Implement `Source`."""
        return list_files(self.path / half, SUFFIXES)

    def listed(self, half: str, names: list[str]) -> tuple[np.ndarray, int] | None:
        """Return the classes of EDM's dataset.json."""
        file = self.path / half / LABELS
        return listed_labels(str(file.parent), file.read_bytes() if file.is_file() else None, names)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Implement `Source`."""
        return file_sizes(self.path, names)

    def __truediv__(self, name: str) -> Path:
        """The picture's file."""
        return self.path / name


class Archive(Source):
    """Pictures in files of many; pickled to the workers it can `open` them, no more."""

    _sizes: dict[str, int]  # of its members by their names

    @abstractmethod
    def open(self, name: str) -> io.BytesIO:
        """A picture's bytes."""

    def folders(self) -> list[str]:
        """Implement `Source`."""
        return sorted({name.partition("/")[0] for name in self._sizes if "/" in name})

    def pictures(self, half: str) -> tuple[list[str], int]:
        """Implement `Source`."""
        prefix = "" if half == "." else f"{half}/"
        names = [name.removeprefix(prefix) for name in self._sizes if name.startswith(prefix)]
        found = sorted(name for name in names if name.lower().endswith(SUFFIXES))
        return found, len(names) - len(found)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Implement `Source`, for what is unpacked."""
        return {name: self._sizes[name.removeprefix("./")] for name in sorted(names)}

    def __truediv__(self, name: str) -> "Member":
        """The picture, as much of a path as reading it takes."""
        return Member(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        return self.__dict__ | {"_sizes": {}}


@dataclass(frozen=True)
class Member:
    """A picture in an archive."""

    source: Archive
    name: str

    def open(self, _mode: str = "rb") -> io.BytesIO:
        """Its bytes."""
        return self.source.open(self.name)

    def __str__(self) -> str:
        """Where it lies, for messages."""
        return f"{self.source.path}/{self.name.removeprefix('./')}"


def hidden(name: str) -> bool:
    """Tell whether a file, or a folder that it is in, is none to look at."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def check_inside(path: Path, name: str) -> None:
    """Raise for the name of an archive's member that no folder could have.

    Raises:
        ConfigError: naming the archive and the member.

    """
    if name.startswith("/") or posixpath.normpath(name) != name or name.split("/")[0] == "..":
        shown = elided(name, MOST_SHOWN)
        raise ConfigError(
            f"{path}: a member named {shown}, expected names inside of it such as cat/1.png; pack it anew"
        )

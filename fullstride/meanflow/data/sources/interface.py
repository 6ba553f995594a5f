"""Sources of pictures: a folder, or files that hold many pictures each, all of them read by name."""

import io
import json
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import MOST_SHOWN, ConfigError, shortened
from fullstride.meanflow.data.sources.folders import file_sizes, halves, list_files, top_folders
from fullstride.runs.atomic_files import note

SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Bytes of the largest file of a picture: of as many pixels as PIL decodes, twice what it warns of, in RGB.
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
        shown = shortened(name, MOST_SHOWN)
        raise ConfigError(
            f"{path}: a member named {shown}, expected names inside the archive such as cat/1.png; pack it again"
        )


LABELS = "dataset.json"
CHUNKED = re.compile(r"\d{5}/img\d{8}\.\w+")


def listed_labels(place: str, content: bytes | None, names: Sequence[str]) -> tuple[np.ndarray, int] | None:
    """The class of each picture and the number of classes by a dataset.json; None where there is none.

    Args:
        place: of the pictures, for messages.
        content: of the file.
        names: of the pictures, relative to it.

    Returns:
        Labels, int64, and one more than the largest of the file; 0 and 0 where it says that there are no classes.

    Raises:
        ConfigError: for a file that is not of that form or does not name every picture, or for pictures of that form
            without it.

    """
    if content is None:
        if all(CHUNKED.fullmatch(name) for name in names):
            raise ConfigError(
                f"{place}: pictures such as {names[0]}, as EDM's dataset_tool writes them, but no {LABELS}, without "
                f'which their folders would count as classes; copy it, too, or write {{"labels": null}} there '
                "for no classes"
            )
        return None
    classes = _parsed(f"{place}/{LABELS}", content)
    if classes is None:
        return np.zeros(len(names), dtype=np.int64), 0
    if missing := [name for name in names if name not in classes]:
        raise ConfigError(
            f"{place}/{LABELS}: no label for {len(missing)} of {len(names)} pictures, such as {missing[0]}; expected "
            "one for each; add them, or remove the pictures"
        )
    if absent := len(classes) - len(names):
        note(f"{place}/{LABELS}: names {absent} pictures that do not exist")
    return np.array([classes[name] for name in names], dtype=np.int64), max(classes.values()) + 1


def _parsed(file: str, content: bytes) -> dict[str, int] | None:
    form = 'EDM\'s {"labels": [["00000/img00000000.png", 3], ...]}, or null instead of the list'
    try:
        pairs = json.loads(content)["labels"]
        if pairs is None:
            return None
        found = {str(name).replace("\\", "/"): label for name, label in pairs}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{file}: expected {form}; repair it, or rename it if it is something else") from None
    wrong = [name for name, label in found.items() if type(label) is not int or label < 0]
    if wrong or not found:
        what = f"{found[wrong[0]]!r} as the label of {wrong[0]}" if wrong else "no label"
        raise ConfigError(f"{file}: {what}, expected a class, counted from 0, for each picture, as in {form}")
    if len(found) < len(pairs):
        raise ConfigError(f"{file}: names a picture twice, expected one label for each")
    return found

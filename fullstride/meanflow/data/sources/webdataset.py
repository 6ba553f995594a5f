"""Pictures in webdataset's shards, read where they lie."""

import io
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import MOST_SHOWN, ConfigError, Damaged, elided
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources.folders import list_files, top_folders
from fullstride.meanflow.data.sources.interface import SUFFIXES, Archive, hidden
from fullstride.meanflow.data.sources.webdataset_shard import LABEL, bytes_at, read_shard
from fullstride.runs.atomic_files import note

SHARD = ".tar"
COMPRESSED = (".tar.bz2", ".tar.gz", ".tar.lz4", ".tar.xz", ".tar.zst", ".tgz")
# The split that a shard's name says, as in imagenet1k-validation-00.tar.
SPLITS = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)


def are_shards(path: Path) -> bool:
    """Tell whether a path is a shard, or a folder with some in it or in its `train`.

    Those that are compressed count, so that they are refused, if there are no pictures.
    """
    if path.is_file():
        return path.name.lower().endswith((SHARD, *COMPRESSED))
    folder = path / "train" if (path / "train").is_dir() else path
    names = os.listdir(folder) if folder.is_dir() else []
    tars = [name for name in names if name.lower().endswith((SHARD, *COMPRESSED)) and not hidden(name)]
    found = [name.lower() for name in tars if (folder / name).is_file()]
    return any(name.endswith(SHARD) for name in found) or (bool(found) and not list_files(folder, SUFFIXES)[0])


class Shards(Archive):
    """A shard, or a folder of them; their names are parts of the pictures' names.

    The classes are the numbers in `.cls`, or else in `cls` or `label` of `.json`.
    """

    labels_file = False

    def __init__(self, path: Path):
        """Make the source; nothing is read before its pictures are asked for."""
        super().__init__(path)
        self._sizes = {}
        self._labels: dict[str, list[int | None]] = {}
        # By half: its shards, the names of its pictures, and the shard, offset and size of each.
        self._places: dict[str, tuple[list[Path], np.ndarray, np.ndarray]] = {}

    def folders(self) -> list[str]:
        """Implement `Source`."""
        return [] if self.path.is_file() else top_folders(self.path)

    def pictures(self, half: str) -> tuple[list[str], int]:
        """Implement `Source`, reading through the half's shards, which are the other files.

        Raises:
            ConfigError: if it is not clear which shards are meant, or from `read_shard`.
            ReadError: if one cannot be read for now.

        """
        where, rows = self.path / half, []
        shards = _shards(where)
        for i, file in enumerate(shards):
            folder = "" if file == where else f"{file.relative_to(where).as_posix()}/"
            found = read_again(partial(read_shard, file), file.__str__)
            rows += [(os.fsencode(folder + part.name), i, part.offset, part.size, label) for part, label in found]
        rows.sort()
        names = [os.fsdecode(row[0]) for row in rows]
        self._labels[half] = [row[4] for row in rows]
        self._sizes |= {f"{half}/{name}".removeprefix("./"): row[3] for name, row in zip(names, rows, strict=True)}
        # No dictionary, which would take each worker far longer to unpickle.
        places = np.array([row[1:4] for row in rows], dtype=np.int64)
        self._places[half] = shards, np.array([row[0] for row in rows]), places
        return names, len(shards)

    def listed(self, half: str, names: list[str]) -> tuple[np.ndarray, int]:
        """Implement `Source`."""
        where, labels = self.path / half, self._labels[half]
        known = [label for label in labels if label is not None]
        if not known:
            note(f"{where}: no {LABEL} in its shards, so no classes")
            return np.zeros(len(names), dtype=np.int64), 0
        if missing := len(labels) - len(known):
            raise ConfigError(
                f"{where}: no class for {missing} of {len(labels)} pictures, such as "
                f"{elided(names[labels.index(None)], MOST_SHOWN)}; expected {LABEL} beside each, or none; add it, or "
                "leave them out"
            )
        return np.array(known, dtype=np.int64), max(known) + 1

    def open(self, name: str) -> io.BytesIO:
        """A picture's bytes.

        Raises:
            OSError: if its shard cannot be read at all.
            Damaged: if its shard became shorter.

        """
        half, _, rest = name.partition("/")
        shards, names, places = self._places[half]
        shard, offset, size = places[np.searchsorted(names, os.fsencode(rest))].tolist()
        with shards[shard].open("rb") as opened:
            content = bytes_at(opened, offset, size)
        if len(content) < size:
            raise Damaged(f"{shards[shard]}: ends at byte {offset + len(content):,}, within {rest}; copy it again")
        return io.BytesIO(content)

    def __getstate__(self) -> dict[str, Any]:
        """Without the labels, too."""
        return super().__getstate__() | {"_labels": {}}


def _shards(where: Path) -> list[Path]:
    """The shards of a half, which is a folder of them or one itself."""
    folder, found = where.parent, [where.name]
    if not where.is_file():
        folder, found = where, list_files(where, (SHARD, *COMPRESSED, *SUFFIXES))[0]
    if packed := [name for name in found if name.lower().endswith(COMPRESSED)]:
        raise ConfigError(
            f"{where}: {packed[0]} is compressed, expected plain tar files; unpack it to one, as gunzip does"
        )
    if loose := [name for name in found if not name.lower().endswith(SHARD)]:
        raise ConfigError(
            f"{where}: pictures such as {loose[0]} where tar files are, too; expected pictures, or webdataset's "
            "shards; move one of them away"
        )
    splits = {said[1].lower(): name for name in found if (said := SPLITS.search(name))}
    if len(splits) > 1:
        raise ConfigError(
            f"{where}: shards of several splits, {' and '.join(splits.values())}; expected those of one; move or link "
            "those to train on into a folder train/, and those to hold out into test/ or val/ beside it"
        )
    return [folder / name for name in found]

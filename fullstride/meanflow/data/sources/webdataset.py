"""Pictures in webdataset's shards, tar files of samples such as 0001.jpg and 0001.cls, read where they lie."""

import io
import json
import os
import re
import tarfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fullstride.errors import MOST_SHOWN, ConfigError, Damaged, one_line, shortened
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources.folders import list_files, note_missing, top_folders
from fullstride.meanflow.data.sources.interface import LARGEST, SUFFIXES, Archive, check_inside, hidden
from fullstride.runs.atomic_files import note

# As webdataset groups members: all with the same name up to the first dot after its last slash are one sample.
SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.[^/]+", re.DOTALL)
LABEL, METADATA = ".cls", ".json"
LABEL_KEYS = ("cls", "label")
# More classes than any set has; NumPy counts no further than 2**63.
MOST_CLASSES = 2**31
# Bytes of a class or of metadata, and of a header's long name: read into memory, whatever a shard says.
LONGEST_TEXT = 16 << 20
# A tar ends with two blocks of zeros, filled up with zeros to a whole record.
BLOCK, LONGEST_END = tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE


class TarMember(NamedTuple):
    """A member of a sample: its bytes lie in the shard as they are."""

    name: str
    offset: int
    size: int


def read_shard(file: Path) -> list[tuple[TarMember, int | None]]:
    """The pictures of a shard and their classes, None for one without.

    Raises:
        OSError: if it cannot be read at all.
        ConfigError: if it is damaged or cut short, or a sample has two pictures, no picture for its class, a class
            that is no number, or members that are no plain files.

    """
    with file.open("rb") as opened:
        samples: dict[str, list[TarMember]] = defaultdict(list)
        for info in _members(file, opened):
            name = info.name.removeprefix("./")
            if not info.isdir() and not hidden(name) and (sample := SAMPLE.fullmatch(name)):
                check_inside(file, name)
                if not info.isfile() or info.issparse() or "\0" in name:
                    raise ConfigError(
                        f"{file}: {shortened(name, MOST_SHOWN)} is a link, a device or a sparse file, or its name "
                        "holds a zero byte; expected regular files; pack it again, with the files instead of links"
                    )
                samples[sample[1]].append(TarMember(name, info.offset_data, info.size))
        return [found for parts in samples.values() if (found := _picture(file, opened, parts))]


def bytes_at(opened: IO[bytes], offset: int, size: int) -> bytes:
    """A part of a file; shorter where the file ends."""
    opened.seek(offset)
    return opened.read(size)


class _Bounded:
    """A file that the library reads headers from, whose long names and attributes may claim any length."""

    def __init__(self, opened: IO[bytes]):
        self._opened = opened
        self.seek = opened.seek
        self.tell = opened.tell

    def read(self, size: int) -> bytes:
        """Read so many bytes."""
        if size > LONGEST_TEXT:
            raise ValueError(f"a header of {size:,} bytes")
        return self._opened.read(size)


def _members(file: Path, opened: IO[bytes]) -> list[tarfile.TarInfo]:
    """List a tar; one that is damaged or cut short is never taken for a smaller one."""
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Bounded(opened)), mode="r:") as archive:
            found, end = archive.getmembers(), archive.offset
    except OSError:
        raise
    # Each part of a header has exceptions of its own for damage.
    except Exception as error:
        raise ConfigError(
            f"{file}: not a complete tar at byte {opened.tell():,} ({one_line(error)}); copy it again, or unpack it to "
            "a plain tar if it is compressed"
        ) from None
    # The library takes a damaged header, and the end of the file, for the end of the tar.
    rest = bytes_at(opened, end, LONGEST_END + 1)
    if not BLOCK <= len(rest) <= LONGEST_END or any(rest):
        raise ConfigError(
            f"{file}: no end of a tar at byte {end:,}, after {len(found)} members; copy it again, or pack it again if "
            "it was concatenated from several or has records of more than 10 KiB"
        )
    return found


def _picture(file: Path, opened: IO[bytes], parts: list[TarMember]) -> tuple[TarMember, int | None] | None:
    """The picture of a sample and its class; None for a sample of something else."""
    picture, label = _only(file, parts, SUFFIXES), _only(file, parts, (LABEL,))
    if picture:
        _check_size(file, picture, LARGEST)
        return picture, _label(file, opened, label or _only(file, parts, (METADATA,)))
    if label:
        raise ConfigError(
            f"{file}: {shortened(label.name, MOST_SHOWN)} without a picture, expected one next to it, with suffix "
            f"{' '.join(SUFFIXES)}; add it, or leave the class out"
        )
    return None


def _check_size(file: Path, part: TarMember, most: int) -> None:
    if part.size > most:
        raise ConfigError(
            f"{file}: {shortened(part.name, MOST_SHOWN)} is of {part.size:,} bytes, expected at most {most:,}; pack it "
            "again without it"
        )


def _only(file: Path, parts: list[TarMember], suffixes: tuple[str, ...]) -> TarMember | None:
    found = [part for part in parts if part.name.lower().endswith(suffixes)]
    if len(found) > 1:
        names = " and ".join(shortened(part.name, MOST_SHOWN) for part in found[:2])
        raise ConfigError(
            f"{file}: {names} belong to one sample, since their names are the same up to the first dot; expected one "
            "picture and one class in each; rename or leave out the others"
        )
    return found[0] if found else None


def _label(file: Path, opened: IO[bytes], part: TarMember | None) -> int | None:
    """The class that a member says."""
    if part is None:
        return None
    _check_size(file, part, LONGEST_TEXT)
    content = bytes_at(opened, part.offset, part.size)
    try:
        found = {LABEL_KEYS[0]: int(content)} if part.name.lower().endswith(LABEL) else json.loads(content)
        values = [found[key] for key in LABEL_KEYS if key in found] if isinstance(found, dict) else []
        value = values[0] if values else None
    except (ValueError, RecursionError):
        value = content.decode(errors="replace")
    if value is None or (type(value) is int and 0 <= value < MOST_CLASSES):
        return value
    raise ConfigError(
        f"{file}: {shortened(part.name, MOST_SHOWN)} says {shortened(str(value), MOST_SHOWN)!r}, expected the number "
        "of a class, counted from 0"
    )


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


class WebDatasetShards(Archive):
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
            note(f"{where}: no {LABEL} in its shards; the data set has no classes")
            return np.zeros(len(names), dtype=np.int64), 0
        if missing := len(labels) - len(known):
            raise ConfigError(
                f"{where}: no class for {missing} of {len(labels)} pictures, such as "
                f"{shortened(names[labels.index(None)], MOST_SHOWN)}; expected {LABEL} next to each, or to none; add "
                "it, or leave them out"
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
            f"{where}: {packed[0]} is compressed, expected uncompressed tar files; decompress it, such as with gunzip"
        )
    if loose := [name for name in found if not name.lower().endswith(SHARD)]:
        raise ConfigError(
            f"{where}: pictures such as {loose[0]} next to tar files; expected pictures, or webdataset's "
            "shards; move one of them away"
        )
    splits = {said[1].lower(): name for name in found if (said := SPLITS.search(name))}
    if len(splits) > 1:
        raise ConfigError(
            f"{where}: shards of several splits, {' and '.join(splits.values())}; expected shards of one; move or link "
            "those to train on into a folder train/, and those to hold out into test/ or val/ next to it"
        )
    note_missing(folder, found)
    return [folder / name for name in found]

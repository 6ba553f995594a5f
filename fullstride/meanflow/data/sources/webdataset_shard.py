"""Content of one of webdataset's shards: a tar file of samples such as 0001.jpg and 0001.cls."""

import json
import re
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import IO, NamedTuple

from fullstride.errors import MOST_SHOWN, ConfigError, elided, in_a_line
from fullstride.meanflow.data.sources.interface import SUFFIXES, check_inside, hidden

# As webdataset groups members: all with the same name up to the first dot after its last slash are one sample.
SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.[^/]+", re.DOTALL)
LABEL, METADATA = ".cls", ".json"
LABEL_KEYS = ("cls", "label")
# More classes than any set has; NumPy counts no further than 2**63.
MOST_CLASSES = 2**31
# A tar ends with two blocks of zeros, filled up with zeros to a whole record.
BLOCK, LONGEST_END = tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE


class Part(NamedTuple):
    """A member of a sample: its bytes lie in the shard as they are."""

    name: str
    offset: int
    size: int


def read_shard(file: Path) -> list[tuple[Part, int | None]]:
    """The pictures of a shard and their classes, None for one without.

    Raises:
        OSError: if it cannot be read at all.
        ConfigError: if it is damaged or cut short, or a sample has two pictures, no picture for its class, a class
            that is no number, or members that are no plain files.

    """
    with file.open("rb") as opened:
        samples: dict[str, list[Part]] = defaultdict(list)
        for info in _members(file, opened):
            name = info.name.removeprefix("./")
            if not info.isdir() and not hidden(name) and (sample := SAMPLE.fullmatch(name)):
                _check_plain(file, name, info)
                samples[sample[1]].append(Part(name, info.offset_data, info.size))
        return [found for parts in samples.values() if (found := _picture(file, opened, parts))]


def bytes_at(opened: IO[bytes], offset: int, size: int) -> bytes:
    """A part of a file; shorter where the file ends."""
    opened.seek(offset)
    return opened.read(size)


def _members(file: Path, opened: IO[bytes]) -> list[tarfile.TarInfo]:
    """List a tar; one that is damaged or cut short is never taken for a smaller one."""
    try:
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            found, end = archive.getmembers(), archive.offset
    except OSError:
        raise
    # Each part of a header has exceptions of its own for damage.
    except Exception as error:
        raise ConfigError(
            f"{file}: not a whole tar at byte {opened.tell():,} ({in_a_line(error)}); copy it again, or unpack it to a "
            "plain tar if it is compressed"
        ) from None
    # The library takes a damaged header, and the end of the file, for the end of the tar.
    rest = bytes_at(opened, end, LONGEST_END + 1)
    if not BLOCK <= len(rest) <= LONGEST_END or any(rest):
        raise ConfigError(
            f"{file}: no end of a tar at byte {end:,}, after {len(found)} members; copy it again, or pack it anew if "
            "it was put together from several or in records of more than 10 KiB"
        )
    return found


def _check_plain(file: Path, name: str, info: tarfile.TarInfo) -> None:
    """Raise for a member that cannot be read where it lies."""
    check_inside(file, name)
    if not info.isfile() or info.issparse() or "\0" in name:
        raise ConfigError(
            f"{file}: {elided(name, MOST_SHOWN)} is a link, a device or a sparse file, or its name holds a zero byte; "
            "expected plain files; pack it anew, with the files in place of links"
        )


def _picture(file: Path, opened: IO[bytes], parts: list[Part]) -> tuple[Part, int | None] | None:
    """The picture of a sample and its class; None for a sample of something else."""
    picture, label = _only(file, parts, SUFFIXES), _only(file, parts, (LABEL,))
    if picture:
        return picture, _label(file, opened, label or _only(file, parts, (METADATA,)))
    if label:
        raise ConfigError(
            f"{file}: {elided(label.name, MOST_SHOWN)} without a picture, expected one beside it, of "
            f"{' '.join(SUFFIXES)}; add it, or leave the class out"
        )
    return None


def _only(file: Path, parts: list[Part], suffixes: tuple[str, ...]) -> Part | None:
    found = [part for part in parts if part.name.lower().endswith(suffixes)]
    if len(found) > 1:
        names = " and ".join(elided(part.name, MOST_SHOWN) for part in found[:2])
        raise ConfigError(
            f"{file}: {names} are of one sample, as their names are the same up to the first dot; expected one picture "
            "and one class in each; rename or leave out the others"
        )
    return found[0] if found else None


def _label(file: Path, opened: IO[bytes], part: Part | None) -> int | None:
    """The class that a member says."""
    if part is None:
        return None
    content = bytes_at(opened, part.offset, part.size)
    try:
        found = {LABEL_KEYS[0]: int(content)} if part.name.lower().endswith(LABEL) else json.loads(content)
        values = [found[key] for key in LABEL_KEYS if key in found] if isinstance(found, dict) else []
        value = values[0] if values else None
    except ValueError:
        value = content.decode(errors="replace")
    if value is None or (type(value) is int and 0 <= value < MOST_CLASSES):
        return value
    raise ConfigError(
        f"{file}: {elided(part.name, MOST_SHOWN)} says {elided(str(value), MOST_SHOWN)!r}, expected the number of a "
        "class from 0 on; write it so"
    )

"""Data sets that are folders of files: where the two splits lie, what is held out if the folder does not say, and a
name for the content.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import ConfigError
from fullstride.meanflow.data.reading import refuse_if_away
from fullstride.runs.atomic_files import note

HELD_OUT = ("test", "val")
HALVES = ("train", *HELD_OUT)
HOLDOUT_SEED = 505
# The last number of a name before its suffix, and of how many, as in train-00007-of-00012.tar.
NUMBERED = re.compile(r"(.*?)(\d+)(-of-\d+)?(\D*)", re.DOTALL)
MOST_NUMBERED = 1_000_000


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """The folders of the training and the held-out records.

    Args:
        root: holds `train` and `test` (or `val`, which is not looked at beside `test`), or only `train`, or the
            records themselves.

    Returns:
        Both folders, the second None where a share of the first is to be held out.

    Raises:
        ConfigError: if `root` is no folder, or it cannot be told what is held out.

    """
    train, test = halves(root, top_folders(root))
    return root / train, None if test is None else root / test


def top_folders(root: Path) -> list[str]:
    """The folders in one that are not hidden.

    Raises:
        ConfigError: if it is no folder.

    """
    if not root.is_dir():
        pattern = "patterns are not expanded; " if set("*?[") & set(str(root)) else ""
        raise ConfigError(
            f"{root}: no such folder; {pattern}expected a folder of data files, or one with train/ and test/"
        )
    return [p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]


def halves(root: Path, folders: Sequence[str]) -> tuple[str, str | None]:
    """Find the split by the names of the folders in `root`, which need not be on disk; `.` is all of it."""
    held_out = [name for name in HELD_OUT if name in folders]
    if "train" not in folders:
        if held_out:
            raise ConfigError(f"{root}: {held_out[0]}/ without train/; expected both, or neither")
        return ".", None
    if held_out:
        return "train", held_out[0]
    if len(folders) > 1:
        other = min(name for name in folders if name != "train")
        raise ConfigError(
            f"{root}: train/ next to {other}/ but no test/ or val/; add one, or rename train/ if it is a class"
        )
    return "train", None


def list_files(folder: Path, suffixes: Iterable[str]) -> tuple[list[str], int]:
    """Files of these suffixes (lower case, with dot) at any depth, and how many others there are.

    Returns:
        Names relative to `folder` with `/` between their parts, sorted, and the number of other files. Hidden files
        and folders are neither; links are followed.

    Raises:
        ConfigError: for a folder that cannot be read, or a link to a folder that it lies in.
        ReadError: if the disk is away for now.

    """

    def refuse(error: OSError) -> None:
        refuse_if_away(error)
        raise ConfigError(f"{error.filename}: {error.strerror}; expected a folder that can be read")

    wanted, names, others = tuple(suffixes), [], 0
    for base, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Followed, a link to a folder above itself would make 41 records of each file, some of them held out. Above it
        # are those that other links have led through, too.
        above = [path.resolve() for path in (Path(base), *Path(base).parents)]
        for path in (Path(base) / name for name in folders):
            if path.is_symlink() and any(each.is_relative_to(path.resolve()) for each in above):
                raise ConfigError(f"{path}: a link to {path.resolve()}, which contains it; remove the link")
        visible = [name for name in files if not name.startswith(".")]
        chosen = [name for name in visible if name.lower().endswith(wanted)]
        inner = Path(base).relative_to(folder).as_posix()
        names += chosen if inner == "." else [f"{inner}/{name}" for name in chosen]
        others += len(visible) - len(chosen)
    return sorted(names), others


def missing_numbers(names: Sequence[str]) -> list[str]:
    """Return the names that numbered files such as `train-000007.tar` or `00007-of-00012.tar` leave out.

    Names whose numbers are mostly missing are taken for names without an order.
    """
    sequences: dict[tuple[str, int, str, str], set[int]] = defaultdict(set)
    for name in names:
        if parts := NUMBERED.fullmatch(name):
            sequences[parts[1], len(parts[2]), parts[3] or "", parts[4]].add(int(parts[2]))
    missing = []
    for (before, width, of, after), there in sequences.items():
        first, last = min(there), max(there)
        if of:
            last = max(last, int(of.removeprefix("-of-")) - (0 if first else 1))
            first = min(first, 1)
        if last - first < 2 * len(there) or (of and last < MOST_NUMBERED):
            gaps = sorted(set(range(first, last + 1)) - there)
            missing += [f"{before}{number:0{width}d}{of}{after}" for number in gaps]
    return missing


def note_missing(folder: Path, names: Sequence[str]) -> None:
    """Say which numbered files a folder lacks, if any."""
    if missing := missing_numbers(names):
        there = "is not there" if len(missing) == 1 else f"and {len(missing) - 1} other numbered files are not there"
        note(f"{folder}: {missing[0]} {there}; copy what is missing, or go on with the {len(names)} that are")


def hold_out(keys: Sequence[str], labels: np.ndarray, share: float) -> np.ndarray:
    """Which records are held out: a fixed share, every class as evenly as whole records allow.

    Args:
        keys: a name for each record; with its class it alone decides, on every machine and under every version.
        labels: the class of each.
        share: between 0 and 1; `floor(share x records)`, of binary numbers, are held out.

    Returns:
        A Boolean for each record.

    Raises:
        ConfigError: if the share is none, or leaves one split empty.

    """
    if not 0 < share < 1:
        raise ConfigError(f"data.holdout={share}: expected a share between 0 and 1, such as 0.1")
    # Not NumPy's permutation: a later version may draw another one.
    ranks = [hashlib.sha256(os.fsencode(f"{HOLDOUT_SEED}/{key}")).digest() for key in keys]
    order = sorted(range(len(keys)), key=lambda i: (labels[i], ranks[i]))
    # Sorted by class and dealt out evenly from end to end.
    passed = np.floor(np.arange(len(keys) + 1) * share)
    held = np.zeros(len(keys), dtype=bool)
    held[order] = passed[1:] > passed[:-1]
    if not held.any():
        raise ConfigError(f"data.holdout={share}: none of {len(keys)} records would be held out; raise it or add test/")
    return held


def file_sizes(root: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each file below `root`, in sorted order.

    Raises:
        ConfigError: for a file that is not there, as what a link names may be.

    """
    sizes = {}
    for name in sorted(names):
        file = root / name
        try:
            sizes[name] = os.path.getsize(file)
        except OSError as error:
            refuse_if_away(error)
            what = f"a link to {os.readlink(file)}, " if file.is_symlink() else ""
            raise ConfigError(f"{file}: {what}{error.strerror}; restore the file, or remove the link or name") from None
    return sizes


def fingerprint(sizes: dict[str, int], *settings: Any) -> str:
    """Sha256 over the names and sizes of files, as `file_sizes` gives them, and the `repr` of settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, size in sizes.items():
        digest.update(os.fsencode(name) + f"\0{size}\n".encode())
    return digest.hexdigest()

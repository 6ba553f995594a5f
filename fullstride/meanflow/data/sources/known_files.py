"""The files that a run was begun with, kept in its folder: so that it can say which of them changed since.

It also says which were held out: a share that is dealt out anew, of files of which some are gone, would hold out what
was trained on.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from fullstride.errors import ConfigError

KNOWN = "data_files.json.gz"
SHOWN = 3


@dataclass(frozen=True)
class KnownFiles:
    """A record of a data set's files.

    Attributes:
        sizes: in bytes, by names relative to the data set's folder.
        held: the names that a share held out; None where the folder itself says which are.
        listed: whether labels are said otherwise than by folders.

    """

    sizes: dict[str, int]
    held: frozenset[str] | None
    listed: bool = False

    def packed(self) -> bytes:
        """Return a file's bytes; for a million names some megabytes."""
        held = None if self.held is None else sorted(self.held)
        found = {"sizes": self.sizes, "held": held, "listed": self.listed}
        return gzip.compress(json.dumps(found).encode(), compresslevel=3, mtime=0)

    @classmethod
    def unpacked(cls, content: bytes) -> "KnownFiles":
        """Read what `packed` wrote."""
        found = json.loads(gzip.decompress(content))
        held = None if found["held"] is None else frozenset(found["held"])
        # Lists that do not say it were written when dataset.json was the only other way.
        listed = found.get("listed", any(name.endswith("dataset.json") for name in found["sizes"]))
        return cls(found["sizes"], held, listed)


def known_files(run: Path) -> KnownFiles | None:
    """The files that a run was begun with; None for one that has none, or that was begun before they were listed.

    Raises:
        ConfigError: if the file is damaged.

    """
    if not (file := run / KNOWN).is_file():
        return None
    try:
        return KnownFiles.unpacked(file.read_bytes())
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: incomplete or damaged ({error}); copy it again") from None


def changed_files(before: KnownFiles | None, after: KnownFiles) -> str:
    """Which files are gone, new or of another size, in words."""
    if before is None:
        return "the changed files are unknown, since the run has no list of its files"
    old, new = before.sizes, after.sizes
    kinds = {
        "gone": sorted(old.keys() - new.keys()),
        "new": sorted(new.keys() - old.keys()),
        "of another size": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }
    shown = {kind: ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN) for kind, names in kinds.items()}
    found = [f"{len(names)} {kind} ({shown[kind]})" for kind, names in kinds.items() if names]
    return ", ".join(found) or "the same files by name and size; their labels or other settings changed"


def check_comparable(before: KnownFiles | None, after: KnownFiles) -> None:
    """Check that a run can go on with changed files: its labels and what it holds out are still the same.

    Raises:
        ConfigError: if a folder of a class is new or gone, so that others would have its number; or if a share is held
            out and which it was is not known.

    """
    if before is None:
        if after.held is not None:
            raise ConfigError(
                f"data.allow_changed=true: the run has no {KNOWN}, which lists the files that it held out; expected "
                "one, or a folder with test/; restore the files, or begin another run"
            )
        return
    names = ([] if files.listed else files.sizes for files in (before, after))
    old, new = ({parts[1] for name in each if len(parts := name.split("/")) > 2} for each in names)
    if differing := sorted(old ^ new):
        raise ConfigError(
            f"data.allow_changed=true: class {differing[0]} is {'new' if differing[0] in new else 'gone'}, expected "
            "the same class folders, whose order numbers the labels; restore them, or begin another run"
        )

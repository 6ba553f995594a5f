"""`data=gcide`: the GNU Collaborative International Dictionary of English, 40 MB of definitions (GPL)."""

import gzip
import re
from pathlib import Path

from fullstride.assets.fetch import fetch
from fullstride.bert.data.corpus import Corpus

# Whose definition it is: [1913 Webster], [WordNet 1.5 +PJC].
SOURCE = re.compile(r"\[[^\][]*(?:Webster|WordNet|PJC|Century)[^\][]*\]")
# An entry begins at the margin; its other lines are indented.
ENTRY = re.compile(r"\n\n+(?=\S)")


def load(path: Path | None = None) -> Corpus:
    """One entry for each headword.

    Args:
        path: the file `gcide.dict.dz` of Debian's package dict-gcide, or its folder; without one the installed
            package's.

    Raises:
        ConfigError: if the file cannot be had, or is another one.

    """
    file = fetch("gcide", path)
    content = file.read_bytes()
    text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode("utf-8", "replace")
    return Corpus("gcide", tuple(entries(text)))


def entries(text: str) -> list[str]:
    """The dictionary's entries, each in one line, without the database's own description and the sources' names."""
    lines = (" ".join(SOURCE.sub(" ", block).split()) for block in ENTRY.split(text) if not block.startswith("00-"))
    return [line for line in lines if line]

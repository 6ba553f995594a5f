"""Texts to train on: whole entries, some of them held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from fullstride.errors import ConfigError


@dataclass(frozen=True)
class Corpus:
    """Texts.

    Attributes:
        name: name for messages.
        entries: texts, each of which is trained on or held out as a whole.

    """

    name: str
    entries: Sequence[str]

    @property
    def fingerprint(self) -> str:
        """Hash that identifies these texts."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(_digest(entry))
        return digest.hexdigest()

    def size(self) -> int:
        """Bytes of the texts in UTF-8."""
        return sum(len(entry.encode()) for entry in self.entries)

    def split(self, share: float) -> tuple["Corpus", "Corpus"]:
        """The corpus without, and the corpus of, a share of its distinct entries, at least one on each side.

        Their content alone decides the side, so that equal entries are on the same side. Held-out entries come in
        an order that depends on their content, too: any first part of them is a sample.

        Raises:
            ConfigError: if there are fewer than two distinct entries.

        """
        digests = [_digest(entry) for entry in self.entries]
        distinct = sorted(set(digests))
        if len(distinct) < 2:
            raise ConfigError(
                f"data={self.name}: {len(distinct)} distinct texts; expected two or more, since some are held out: "
                "give more files, or use data.separator=blank_line"
            )
        held = set(distinct[: min(max(1, round(share * len(distinct))), len(distinct) - 1)])
        pairs = list(zip(digests, self.entries, strict=True))
        kept = tuple(entry for digest, entry in pairs if digest not in held)
        return Corpus(self.name, kept), Corpus(self.name, tuple(e for d, e in sorted(pairs) if d in held))

    def sample(self, size: int) -> "Corpus":
        """The first entries, until they have `size` bytes; all for 0."""
        taken, total = [], 0
        for entry in self.entries:
            if size and total >= size:
                break
            taken.append(entry)
            total += len(entry.encode())
        return Corpus(self.name, tuple(taken))


def _digest(entry: str) -> bytes:
    return hashlib.blake2b(entry.encode(), digest_size=16).digest()

"""Allocation of KV cache blocks; full blocks are identified by a hash of their contents, and shared."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np


def digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash a full block by its tokens and, through the previous block's hash, by all tokens before them."""
    return blake2b(np.asarray(tokens, np.int32).tobytes(), key=before, digest_size=16).digest()


def block_hashes(tokens: Sequence[int], size: int, before: bytes = b"") -> list[bytes]:
    """Return the hashes of the full blocks of `tokens`, from the first on; `before` is the hash before the first."""
    names: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        names.append(digest(names[-1] if names else before, tokens[start : start + size]))
    return names


def salted(before: bytes, salt: str) -> bytes:
    """Return the hash before the first block of prompts with a salt; no block has it, whatever the salt."""
    return blake2b(salt.encode(), key=before, digest_size=16, person=b"salt").digest() if salt else before


@dataclass
class BlockTable:
    """Blocks of a sequence for the layers of one group, in order; 0 in place of those that no token sees any more.

    Attributes:
        window: tokens that a token sees in these layers, itself included; None for all.
        blocks: their numbers.
        freed: number of blocks at the beginning that were given back.

    """

    window: int | None
    blocks: list[int] = field(default_factory=list)
    freed: int = 0

    def unseen(self, position: int, size: int) -> list[int]:
        """Take out the blocks, of `size` tokens, that no token from `position` on sees."""
        if self.window is None or (last := (position - self.window + 1) // size) <= self.freed:
            return []
        found, count = self.blocks[self.freed : last], last - self.freed
        self.blocks[self.freed : last], self.freed = [0] * count, last
        return found


class BlockManager:
    """Blocks 1 to `count`, with reference counts.

    A block that nobody uses is free, but what it holds can be found until it is given out again; of the free ones the
    one that was used longest ago goes first.
    """

    def __init__(self, count: int, caching: bool = True):
        """Start with all blocks free and empty."""
        self.count, self.caching = count, caching
        self._users = [0] * (count + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))
        self._names: dict[int, bytes] = {}
        self._found: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._free)

    def find(self, name: bytes) -> int:
        """Return the cached block of this name; 0 if there is none."""
        return self._found.get(name, 0)

    def is_free(self, block: int) -> bool:
        """Return whether no sequence uses `block`."""
        return not self._users[block]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks that hold a wanted prefix."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Allocate blocks for new contents; as many must be free."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._users[block] = 1
            if (name := self._names.pop(block, None)) is not None:
                del self._found[name]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks; the last is reused first, since beginnings are shared more often than ends."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._names:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, name: bytes) -> None:
        """Register a full block under its hash; of two blocks with the same contents, the first is found."""
        if self.caching and name not in self._found and block not in self._names:
            self._names[block], self._found[name] = name, block

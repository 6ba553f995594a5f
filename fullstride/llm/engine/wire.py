"""What the host tells the device at each step: one small array of int32, whose parts have names on both sides.

The same slices are writable views of a numpy array and values of a traced one.
"""

from typing import Any, NamedTuple

import numpy as np

# Token ids that end a request; its own and the model's.
STOPS = 16
# A row's parameters in words: see `Params`.
PARAMS = 12 + STOPS
SPECIAL, MASKED, WANTED = 1, 2, 4
# What a row does in a mixed step.
IDLE, DECODE, CHUNK, LAST_CHUNK = range(4)


class Params(NamedTuple):
    """A row's words: integers and, bit by bit, floats, which stay on the device while the row runs.

    Attributes:
        limit: tokens that the sequence may have in all.
        min_until: position before which no stop may be chosen.
        key: two words.
        numbers: temperature, top_p, min_p, penalties for repetition, presence and frequency.
        flags: SPECIAL, MASKED, WANTED.
        stops: ids, -1 for none.

    """

    limit: Any
    min_until: Any
    top_k: Any
    key: Any
    numbers: Any
    flags: Any
    stops: Any

    @classmethod
    def of(cls, words: Any) -> "Params":
        """Parts of an array whose last axis has PARAMS words."""
        one = (words[..., i] for i in (0, 1, 2, 11))
        limit, min_until, top_k, flags = one
        return cls(limit, min_until, top_k, words[..., 3:5], words[..., 5:11], flags, words[..., 12:])


class Decode(NamedTuple):
    """A burst of decode steps.

    Attributes:
        head: how many steps, and whether to end when a row does.
        slots: the device's row of each row; the last one is nobody's.
        capacity: tokens for which the row has blocks.
        tables: block tables.

    """

    head: Any
    slots: Any
    capacity: Any
    tables: Any

    @classmethod
    def of(cls, packed: Any, rows: int) -> "Decode":
        """Parts of the array."""
        body = packed[2:].reshape(rows, -1)
        return cls(packed[:2], body[:, 0], body[:, 1], body[:, 2:])

    @staticmethod
    def size(rows: int, width: int) -> int:
        """Words of the array."""
        return 2 + rows * (2 + width)


class Mixed(NamedTuple):
    """One step of decode rows and of prompts' chunks, cut in tiles.

    Attributes:
        slots: as in `Decode`, and so are `capacity` and `tables`.
        kinds: IDLE, DECODE, CHUNK or LAST_CHUNK.
        at: of a chunk, where its last token is in the batch.
        length: of a chunk, tokens of the sequence that have keys and values after the step.
        params: of a chunk, the row's.
        tile_rows: row of each tile.
        tile_starts: position of its first token.
        tile_counts: how many it has.
        tokens: of the tiles.
        targets: what follows each token, where its logprob is asked for; else -1.

    """

    slots: Any
    kinds: Any
    capacity: Any
    at: Any
    length: Any
    params: Any
    tables: Any
    tile_rows: Any
    tile_starts: Any
    tile_counts: Any
    tokens: Any
    targets: Any

    @classmethod
    def of(cls, packed: Any, rows: int, tiles: int, tile: int) -> "Mixed":
        """Parts of the array."""
        each = packed[: tiles * (3 + 2 * tile)].reshape(tiles, -1)
        body = packed[tiles * (3 + 2 * tile) :].reshape(rows, -1)
        slots, kinds, capacity, at, length = (body[:, i] for i in range(5))
        params, tables = body[:, 5 : 5 + PARAMS], body[:, 5 + PARAMS :]
        owners, starts, counts = (each[:, i] for i in range(3))
        tokens, targets = each[:, 3 : 3 + tile], each[:, 3 + tile :]
        return cls(slots, kinds, capacity, at, length, params, tables, owners, starts, counts, tokens, targets)

    @staticmethod
    def size(rows: int, tiles: int, tile: int, width: int) -> int:
        """Words of the array."""
        return tiles * (3 + 2 * tile) + rows * (5 + PARAMS + width)


def words(*numbers: float) -> np.ndarray:
    """Floats as the int32 of the same bits."""
    return np.asarray(numbers, np.float32).view(np.int32)

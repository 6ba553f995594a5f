"""Input of a step from the host: one small int32 array, whose fields have names on both sides.

Both sides read it by a `Layout`: its fields are writable views of a NumPy array, or values of a traced one.
"""

from typing import Any, NamedTuple

import numpy as np


class Layout:
    """Named consecutive fields of an array's last axis.

    Attributes:
        size: integers of all fields, without those of an open field.

    """

    def __init__(self, *numbers: str, **widths: int | None):
        """Name fields of one integer first, then those of several; None, for the last one, takes the rest."""
        self._at: dict[str, int | slice] = {name: at for at, name in enumerate(numbers)}
        self.size = len(numbers)
        for name, width in widths.items():
            start, self.size = self.size, self.size + (width or 0)
            self._at[name] = slice(start, None if width is None else self.size)

    def of(self, words: Any) -> dict[str, Any]:
        """Return the fields of an array."""
        return {name: words[..., at] for name, at in self._at.items()}

    def put(self, words: np.ndarray, /, **values: Any) -> None:
        """Write fields of an array."""
        for name, value in values.items():
            words[..., self._at[name]] = value


# Token ids that end a request; its own and the model's.
STOPS = 16
# Entries of logit_bias that a request may have, as many as OpenAI's API takes.
BIASES = 300
SPECIAL, MASKED, WANTED, POOL_LAST, POOL_MEAN = 1, 2, 4, 8, 16
# Roles of a row in a mixed step.
IDLE, DECODE, CHUNK, LAST_CHUNK = range(4)
# A row's floats, bit by bit.
NUMBERS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
PARAMS = Layout("limit", "min_until", "top_k", "flags", "adapter", key=2, numbers=len(NUMBERS), stops=STOPS)
MIXED_ROW = Layout("slots", "kinds", "capacity", "at", "length", params=PARAMS.size, tables=None)
# Of a row with penalties, biases or a grammar, to count and to be masked by; padding of the tokens is -1.
HISTORY = Layout("row", "prompt", bias_ids=BIASES, bias=BIASES, tokens=None)
MASK = Layout("row", bits=None)


def decode_layout(drafts: int) -> Layout:
    """Fields of one row of a decode step, with so many drafted tokens."""
    return Layout("slots", "capacity", drafts=drafts, tables=None)


def tile_layout(tile: int) -> Layout:
    """Fields of one tile of a mixed step."""
    return Layout("tile_rows", "tile_starts", "tile_counts", tokens=tile, targets=tile)


class RowParams(NamedTuple):
    """Parameters of a row: integers and bit-cast floats, which stay on the device while the row runs.

    Attributes:
        limit: tokens that the sequence may have in total.
        min_until: position before which no stop may be chosen.
        flags: bits SPECIAL, MASKED, WANTED, POOL_LAST and POOL_MEAN.
        adapter: slot of its LoRA adapter, -1 for none.
        key: random key, two integers.
        numbers: floats named by `NUMBERS`.
        stops: stop token ids, -1 for none.

    """

    limit: Any
    min_until: Any
    top_k: Any
    flags: Any
    adapter: Any
    key: Any
    numbers: Any
    stops: Any

    @classmethod
    def of(cls, words: Any) -> "RowParams":
        """Return the fields of an array whose last axis is laid out as `PARAMS`."""
        return cls(**PARAMS.of(words))


class DecodeInput(NamedTuple):
    """Input of a burst of decode steps, or of one that verifies drafts.

    Attributes:
        head: number of steps, and whether to stop when a row ends.
        slots: device row of each row; the last one is for padding.
        capacity: tokens for which each row has blocks.
        drafts: tokens that may follow the newest one of each row, -1 for none; a burst has no such column.
        tables: block tables.

    """

    head: Any
    slots: Any
    capacity: Any
    drafts: Any
    tables: Any

    @classmethod
    def of(cls, packed: Any, rows: int, drafts: int = 0) -> "DecodeInput":
        """Return the fields of the array."""
        return cls(packed[:2], **decode_layout(drafts).of(packed[2:].reshape(rows, -1)))

    @staticmethod
    def size(rows: int, width: int, drafts: int = 0) -> int:
        """Return the number of integers of the array."""
        return 2 + rows * (decode_layout(drafts).size + width)


class MixedInput(NamedTuple):
    """Input of one step of decode rows and of prompt chunks, cut into tiles.

    Attributes:
        slots: device rows, like `capacity` and `tables` as in `DecodeInput`.
        kinds: role of each row: IDLE, DECODE, CHUNK or LAST_CHUNK.
        at: index in the batch of each chunk's last token.
        length: tokens of each chunk's sequence with keys and values after the step.
        params: parameters of each chunk's row.
        tile_rows: row of each tile.
        tile_starts: position of each tile's first token.
        tile_counts: number of tokens of each tile.
        tokens: tokens of the tiles.
        targets: token that follows each token, if its logprob is requested; else -1.

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
    def of(cls, packed: Any, rows: int, tiles: int, tile: int) -> "MixedInput":
        """Return the fields of the array."""
        layout = tile_layout(tile)
        each, body = packed[: tiles * layout.size], packed[tiles * layout.size :]
        return cls(**MIXED_ROW.of(body.reshape(rows, -1)), **layout.of(each.reshape(tiles, -1)))

    @staticmethod
    def size(rows: int, tiles: int, tile: int, width: int) -> int:
        """Return the number of integers of the array."""
        return tiles * tile_layout(tile).size + rows * (MIXED_ROW.size + width)


def words(*numbers: float) -> np.ndarray:
    """Return floats as the int32 of the same bits."""
    return np.asarray(numbers, np.float32).view(np.int32)

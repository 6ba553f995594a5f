"""Input of a step from the host: one small int32 array, whose fields have names on both sides.

Both sides read it by a `Layout`: its fields are writable views of a NumPy array, or values of a traced one.
"""

from typing import Any, NamedTuple

import numpy as np


class Layout:
    """Consecutive parts of an array's last axis, by name.

    Attributes:
        size: words of all of them, without those of an open part.

    """

    def __init__(self, *numbers: str, **widths: int | None):
        """Name what is one number first, then what has so many words; None, for the last one, is all that is left."""
        self._at: dict[str, int | slice] = {name: at for at, name in enumerate(numbers)}
        self.size = len(numbers)
        for name, width in widths.items():
            start, self.size = self.size, self.size + (width or 0)
            self._at[name] = slice(start, None if width is None else self.size)

    def of(self, words: Any) -> dict[str, Any]:
        """The parts of an array."""
        return {name: words[..., at] for name, at in self._at.items()}

    def put(self, words: np.ndarray, /, **values: Any) -> None:
        """Write parts of an array."""
        for name, value in values.items():
            words[..., self._at[name]] = value


# Token ids that end a request; its own and the model's.
STOPS = 16
# Entries of logit_bias that a request may have, as many as OpenAI's API takes.
BIASES = 300
SPECIAL, MASKED, WANTED = 1, 2, 4
# What a row does in a mixed step.
IDLE, DECODE, CHUNK, LAST_CHUNK = range(4)
# A row's floats, bit by bit.
NUMBERS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
PARAMS = Layout("limit", "min_until", "top_k", "flags", key=2, numbers=len(NUMBERS), stops=STOPS)
DECODE_ROW = Layout("slots", "capacity", tables=None)
MIXED_ROW = Layout("slots", "kinds", "capacity", "at", "length", params=PARAMS.size, tables=None)
# Of a row with penalties, biases or a grammar, to count and to be masked by; padding of the tokens is -1.
HISTORY = Layout("row", "prompt", bias_ids=BIASES, bias=BIASES, tokens=None)
MASK = Layout("row", bits=None)


def tile_layout(tile: int) -> Layout:
    """The parts of one of a mixed step's tiles."""
    return Layout("tile_rows", "tile_starts", "tile_counts", tokens=tile, targets=tile)


class RowParams(NamedTuple):
    """A row's words: integers and, bit by bit, floats, which stay on the device while the row runs.

    Attributes:
        limit: tokens that the sequence may have in all.
        min_until: position before which no stop may be chosen.
        flags: SPECIAL, MASKED, WANTED.
        key: two words.
        numbers: those of `NUMBERS`.
        stops: ids, -1 for none.

    """

    limit: Any
    min_until: Any
    top_k: Any
    flags: Any
    key: Any
    numbers: Any
    stops: Any

    @classmethod
    def of(cls, words: Any) -> "RowParams":
        """Parts of an array whose last axis is laid out as `PARAMS`."""
        return cls(**PARAMS.of(words))


class DecodeInput(NamedTuple):
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
    def of(cls, packed: Any, rows: int) -> "DecodeInput":
        """Parts of the array."""
        return cls(packed[:2], **DECODE_ROW.of(packed[2:].reshape(rows, -1)))

    @staticmethod
    def size(rows: int, width: int) -> int:
        """Words of the array."""
        return 2 + rows * (DECODE_ROW.size + width)


class MixedInput(NamedTuple):
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
    def of(cls, packed: Any, rows: int, tiles: int, tile: int) -> "MixedInput":
        """Parts of the array."""
        layout = tile_layout(tile)
        each, body = packed[: tiles * layout.size], packed[tiles * layout.size :]
        return cls(**MIXED_ROW.of(body.reshape(rows, -1)), **layout.of(each.reshape(tiles, -1)))

    @staticmethod
    def size(rows: int, tiles: int, tile: int, width: int) -> int:
        """Words of the array."""
        return tiles * tile_layout(tile).size + rows * (MIXED_ROW.size + width)


def words(*numbers: float) -> np.ndarray:
    """Floats as the int32 of the same bits."""
    return np.asarray(numbers, np.float32).view(np.int32)

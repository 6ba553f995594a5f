"""Rows of tokens in memory, and the facts about a vocabulary that masking needs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.tokenizer import continues_word, specials_of
from fullstride.errors import ConfigError


@dataclass(frozen=True)
class Vocabulary:
    """Facts about a tokenizer's vocabulary that masking needs.

    Attributes:
        size: number of tokens.
        pad: the number of [PAD].
        first: the number of [CLS].
        last: the number of [SEP].
        mask: the number of [MASK].
        ordinary: numbers of the tokens that are none of the five special ones.
        inside: mask of the tokens that continue the word before them.

    """

    size: int
    pad: int
    first: int
    last: int
    mask: int
    ordinary: Int[np.ndarray, " ordinary"]
    inside: Bool[np.ndarray, " size"]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Read a tokenizer with BERT's special tokens or RoBERTa's."""
        vocabulary = tokenizer.get_vocab()
        size = max(vocabulary.values()) + 1
        pad, _, first, last, mask = special = [vocabulary[name] for name in specials_of(tokenizer)]
        ordinary = np.asarray(sorted(set(vocabulary.values()) - set(special)), np.int32)
        inside = np.zeros(size, bool)
        inside[[i for token, i in vocabulary.items() if i not in special and continues_word(tokenizer, token)]] = True
        return cls(size, pad, first, last, mask, ordinary, inside)


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens.

    Attributes:
        tokens: token numbers, [PAD] after the last text.
        segments: 1 for the tokens of a row's first text, 2 for the second, ...; 0 for padding.
        vocabulary: the vocabulary of the numbers.
        packed: whether a row may hold several texts.

    """

    tokens: Int[np.ndarray, "rows length"]
    segments: Int[np.ndarray, "rows length"]
    vocabulary: Vocabulary
    packed: bool

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    def __getitem__(self, rows: Int[np.ndarray, " b"] | slice) -> "TokenRows":
        """Rows at some indices."""
        return TokenRows(self.tokens[rows], self.segments[rows], self.vocabulary, self.packed)

    @cached_property
    def hideable(self) -> Bool[np.ndarray, "rows length"]:
        """Mask of the texts' own tokens: not padding, [CLS] or [SEP]."""
        ends = (self.tokens == self.vocabulary.first) | (self.tokens == self.vocabulary.last)
        return (self.segments > 0) & ~ends

    def count(self) -> int:
        """Number of the texts' own tokens."""
        return int(self.hideable.sum())


# Texts that are encoded at once: the library's own objects take far more room than their tokens.
AT_ONCE = 4096
ENDS = 2  # [CLS] and [SEP]


def rows_of(corpus: Corpus, tokenizer: Tokenizer, length: int, *, pack: bool = True) -> TokenRows:
    """The rows of a corpus.

    Args:
        corpus: texts, in which names in brackets, such as [MASK], are not special tokens.
        tokenizer: a tokenizer with BERT's special tokens or RoBERTa's.
        length: number of tokens of a row; longer texts are cut into pieces.
        pack: whether several pieces share a row if they fit; otherwise each has a row of its own.

    Raises:
        ConfigError: if a row has no room for a token.

    """
    if length <= ENDS:
        raise ConfigError(
            f"data.length={length}: expected at least {ENDS + 1}, two of which mark the beginning and end of a text"
        )
    tokens, texts = encoded(corpus, tokenizer)
    starts, sizes = _pieces(texts, length - ENDS)
    order, row = pack_rows(sizes + ENDS, length) if pack else (np.arange(len(sizes)), np.arange(len(sizes)))
    vocabulary = Vocabulary.of(tokenizer)
    return TokenRows(*_filled(tokens, starts[order], sizes[order], row, length, vocabulary), vocabulary, pack)


def encoded(corpus: Corpus, tokenizer: Tokenizer) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " texts"]]:
    """All tokens of a corpus, one after another, and the number of each text's tokens."""
    tokens, counts = [], []
    before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
    try:
        for first in range(0, len(corpus.entries), AT_ONCE):
            texts = list(corpus.entries[first : first + AT_ONCE])
            found = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            counts.extend(map(len, found))
            tokens.append(np.concatenate([np.asarray(ids, np.int32) for ids in found]))
    finally:
        tokenizer.encode_special_tokens = before
    return np.concatenate(tokens) if tokens else np.zeros(0, np.int32), np.asarray(counts, np.int64)


def _pieces(texts: Int[np.ndarray, " texts"], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of each piece of at most `size` tokens; lengths of a text's pieces differ by at most one."""
    counts = -(-texts // size)
    text = np.repeat(np.arange(len(texts)), counts)
    number = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = texts[text] * number // counts[text]
    end = texts[text] * (number + 1) // counts[text]
    return (np.cumsum(texts) - texts)[text] + begin, end - begin


def pack_rows(sizes: Int[np.ndarray, " n"], length: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Assign pieces to rows: the longest first, each to the fullest row that has room for it.

    Returns:
        The pieces, row by row, and the row of each.

    """
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r is set where a row has room for r tokens
    row, count = np.empty(len(sizes), np.int64), 0
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1
            chosen = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, chosen, count = length, count, count + 1
        by_room[room - size].append(chosen)
        rooms |= 1 << room - size
        row[piece] = chosen
    order = np.argsort(row, kind="stable")
    return order, row[order]


def _filled(
    tokens: np.ndarray, starts: np.ndarray, sizes: np.ndarray, row: np.ndarray, length: int, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments of pieces that come row by row."""
    shape = (int(row[-1]) + 1 if len(row) else 0, length)
    out = np.full(shape, vocabulary.pad, np.int32)
    segments = np.zeros(shape, np.int32)
    spans = sizes + ENDS
    first_of_row = np.flatnonzero(np.diff(row, prepend=-1))
    before = np.cumsum(spans) - spans
    pieces = np.diff(first_of_row, append=len(row))
    column = before - np.repeat(before[first_of_row], pieces)
    number = np.arange(len(row)) - np.repeat(first_of_row, pieces) + 1
    # One entry for every token of the rows, its ends included.
    piece = np.repeat(np.arange(len(row)), spans)
    place = np.arange(len(piece)) - np.repeat(before, spans)
    at = row[piece], column[piece] + place
    segments[at] = number[piece]
    inner = (place > 0) & (place <= sizes[piece])
    out[at] = np.where(place == 0, vocabulary.first, vocabulary.last)
    out[at[0][inner], at[1][inner]] = tokens[(starts[piece] + place - 1)[inner]]
    return out, segments

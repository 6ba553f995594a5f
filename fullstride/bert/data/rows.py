"""Rows of tokens in memory, and what of a vocabulary masking needs to know."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from fullstride.bert.data.tokenizer import CLASS, INSIDE, MASK, PAD, SEPARATOR, SPECIALS


@dataclass(frozen=True)
class Vocabulary:
    """What of a tokenizer is needed to hide tokens.

    Attributes:
        size: how many tokens there are.
        pad: the number of [PAD].
        first: of [CLS].
        last: of [SEP].
        mask: of [MASK].
        ordinary: numbers of the tokens that are none of the five special ones.
        inside: which tokens continue the word before them.

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
        """Read a tokenizer with BERT's special tokens."""
        vocabulary = tokenizer.get_vocab()
        size = max(vocabulary.values()) + 1
        pad, first, last, mask = (vocabulary[name] for name in (PAD, CLASS, SEPARATOR, MASK))
        inside = np.zeros(size, bool)
        inside[[i for token, i in vocabulary.items() if token.startswith(INSIDE)]] = True
        special = {vocabulary[name] for name in SPECIALS}
        ordinary = np.asarray(sorted(i for i in vocabulary.values() if i not in special), np.int32)
        return cls(size, pad, first, last, mask, ordinary, inside)


@dataclass(frozen=True)
class Rows:
    """Rows of tokens.

    Attributes:
        tokens: their numbers, [PAD] after the last text.
        segments: 1 for the tokens of a row's first text, 2 for the second, ...; 0 for padding.
        vocabulary: what the numbers mean.
        packed: whether a row may hold several texts.

    """

    tokens: Int[np.ndarray, "rows length"]
    segments: Int[np.ndarray, "rows length"]
    vocabulary: Vocabulary
    packed: bool

    def __len__(self) -> int:
        """How many rows."""
        return len(self.tokens)

    def __getitem__(self, rows: Int[np.ndarray, " b"] | slice) -> "Rows":
        """Some of them."""
        return Rows(self.tokens[rows], self.segments[rows], self.vocabulary, self.packed)

    @cached_property
    def hideable(self) -> Bool[np.ndarray, "rows length"]:
        """Where there is a text's own token: no padding, [CLS] or [SEP]."""
        ends = (self.tokens == self.vocabulary.first) | (self.tokens == self.vocabulary.last)
        return (self.segments > 0) & ~ends

    def count(self) -> int:
        """How many tokens of texts there are."""
        return int(self.hideable.sum())

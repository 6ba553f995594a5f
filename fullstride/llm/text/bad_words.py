"""Words that a text must not have, as vLLM defines them: the last token of each is masked after the others."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from fullstride.errors import ConfigError
from fullstride.llm.text.tokenizer import Tokenizer


def word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each word, at the beginning of a text and after a space if that has as many tokens."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(before + word.lstrip(), special=False)) for before in ("", " "))
        found.append(plain)
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return [tokens for tokens in dict.fromkeys(found) if tokens]


class DeadEndError(ConfigError):
    """Text that no token may follow; its `code` is that of a server's answer."""

    code = "no_token_left"


class BadWordsMatcher:
    """Matcher of a text without these words; like a grammar's, which it may hold, too."""

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int, grammar: Any = None):
        """Start a text.

        Args:
            words: tokens of each word.
            vocab_size: number of the model's ids.
            grammar: matcher of the text's grammar, if it has one.

        """
        self._words = [(tuple(word[:-1]), word[-1]) for word in words]
        self._grammar, self._said = grammar, list[int]()
        self._all = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        if rest := vocab_size % 32:
            self._all[-1] = (1 << rest) - 1

    def mask(self) -> UInt32[np.ndarray, " words"]:
        """The tokens that may come next; see `Matcher.mask`.

        Raises:
            DeadEndError: if each token that the grammar allows would end a word.

        """
        bits = np.array(self._all if self._grammar is None else self._grammar.mask())
        for before, token in self._words:
            if not before or tuple(self._said[-len(before) :]) == before:
                bits[token // 32] &= ~np.uint32(1 << token % 32)
        if not bits.any():
            allowed = "bad_words forbid every token that the model has"
            if self._grammar is not None:
                allowed = "structured output cannot go on: bad_words forbid every token that it allows here"
            raise DeadEndError(f"{allowed}; leave out words that each of its texts may need")
        return bits

    def advance(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it."""
        self._said.append(token)
        return self._grammar is None or self._grammar.advance(token)

"""Incremental UTF-8 decoding, and the boundary between one text and the next."""

import codecs
from typing import NamedTuple

# Bytes of a character in UTF-8, but for its last one.
MOST_OF_A_CHARACTER = 3


class Utf8Decoder:
    """Incremental UTF-8 decoder; invalid bytes become U+FFFD."""

    def __init__(self, pending: bytes = b""):
        """Begin a text.

        Args:
            pending: of a character that the text before has begun; this text has it if it goes on with it.

        """
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = pending

    def push(self, said: bytes) -> str:
        """Add bytes and return the characters that are complete now."""
        if self._pending and said:
            self._decoder.setstate((self._pending if goes_on(said) else b"", 0))
            self._pending = b""
        return self._decoder.decode(said)

    def flush(self) -> str:
        """Return the text held back at the end."""
        return self._decoder.decode(b"", final=True)

    @property
    def half(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]


def goes_on(said: bytes) -> bool:
    """Return whether the first byte continues a character."""
    return said[:1] != b"" and said[0] & 0xC0 == 0x80


class TextPrefix(NamedTuple):
    """Beginning of a text.

    Attributes:
        strips: whether its first space is left out, since SentencePiece adds one before a text's first word.
        pending: bytes of a character that the tokens before it began, and that is this text's if it goes on with it.

    """

    strips: bool
    pending: bytes = b""


def whole_characters(text: str) -> str:
    r"""The text with U+FFFD for half a surrogate pair, which JSON's `\ud800` can spell and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Incremental UTF-8 decoding, and the boundary between one text and the next."""

import codecs
from typing import NamedTuple

# Bytes of a character in UTF-8, but for its last one.
MOST_OF_A_CHARACTER = 3


class TextPrefix(NamedTuple):
    """Beginning of a text.

    Attributes:
        strips: whether its first space is left out, since SentencePiece adds one before a text's first word.
        pending: bytes of a character that the tokens before it began, and that is this text's if it goes on with it.

    """

    strips: bool = False
    pending: bytes = b""


class Utf8Decoder:
    """Incremental UTF-8 decoder of a text that begins as told; invalid bytes become U+FFFD."""

    def __init__(self, beginning: TextPrefix = TextPrefix()):  # noqa: B008, it is immutable
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips, self._pending = beginning

    def push(self, said: bytes) -> str:
        """Add bytes and return the characters that are complete now."""
        if self._pending and said:
            self._decoder.setstate((self._pending if goes_on(said) else b"", 0))
            self._pending = b""
        return self._cut(self._decoder.decode(said))

    def flush(self) -> str:
        """Return the text held back at the end."""
        return self._cut(self._decoder.decode(b"", final=True))

    def _cut(self, text: str) -> str:
        if not (self._strips and text):
            return text
        self._strips = False
        return text.removeprefix(" ")

    @property
    def half(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]


def goes_on(said: bytes) -> bool:
    """Return whether the first byte continues a character."""
    return said[:1] != b"" and said[0] & 0xC0 == 0x80


def whole_characters(text: str) -> str:
    r"""The text with U+FFFD for half a surrogate pair, which JSON's `\ud800` can spell and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

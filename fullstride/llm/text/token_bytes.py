"""What each token adds to a text, in bytes, read out of a tokenizer's own description of how it decodes."""

import json
import re
from typing import Any

import tokenizers

from fullstride.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = "ByteLevel (GPT-2's) or ByteFallback (SentencePiece's)"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = _byte_of_character()


def all_token_bytes(backend: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of ids 0 to vocab_size - 1; none for ids that are no token's.

    Raises:
        ConfigError: if the tokenizer decodes in a way that has no bytes for single tokens.

    """
    kinds = {decoder["type"] for decoder in _decoders(backend)}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ConfigError(f"the tokenizer's decoder is {', '.join(sorted(kinds)) or 'none'}; expected {SUPPORTED}")
    convert = _byte_level if "ByteLevel" in kinds else _sentence_piece
    table = [b""] * vocab_size
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        table[token] = convert(text)
    # Added tokens are decoded as they are written, but for byte-level ones, which `tokenizers` treats as all others.
    if convert is not _byte_level:
        for token, added in backend.get_added_tokens_decoder().items():
            table[token] = added.content.encode()
    return table


def strips_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding takes away a text's first space, which SentencePiece puts there."""
    strips = [decoder for decoder in _decoders(backend) if decoder["type"] == "Strip"]
    return any(decoder["content"] == " " and decoder["start"] for decoder in strips)


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as tokenizer.json writes them."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(text: str) -> bytes:
    try:
        return bytes(map(ALPHABET.__getitem__, text))
    except KeyError:
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(text)
    return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()

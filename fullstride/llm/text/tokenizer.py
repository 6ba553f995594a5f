"""Tokenizer of a model: text to token ids and back, and conversations to text by the chat template."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from fullstride.errors import ConfigError
from fullstride.llm.text.chat_template import ChatTemplate, NoPlaceForToolsError
from fullstride.llm.text.utf8_stream import MOST_OF_A_CHARACTER, TextPrefix, Utf8Decoder

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = "ByteLevel (GPT-2's) or ByteFallback (SentencePiece's)"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = _byte_of_character()


class Tokenizer:
    """Tokenizer of a model; safe to share between threads.

    Attributes:
        backend: the `tokenizers` object.
        eos: token ids that end a sequence.
        bos: token id that starts a sequence, if the model has one.
        vocab_size: number of the model's ids: those of the tokenizer, and any that only pad the embedding.
        shown: special tokens, as they are spelled, that are a part of texts all the same.
        template: chat template, which turns a conversation into a prompt; None if the model has none.

    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: Iterable[int] = (),
        bos: int | None = None,
        template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        shown: Iterable[str] = (),
    ):
        """See the attributes; without `vocab_size` the ids are those of the tokenizer."""
        self.backend, self.eos, self.bos, self.template = backend, tuple(eos), bos, template
        self.shown = frozenset(shown)
        self.vocab_size = vocab_size or 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def of_model(self, vocab_size: int, eos: Iterable[int]) -> "Tokenizer":
        """Return this tokenizer for a model with `vocab_size` ids and the end tokens `eos`.

        Raises:
            ConfigError: if the tokenizer has ids that the model has not.

        """
        if self.vocab_size > vocab_size:
            last = self.vocab_size - 1
            raise ConfigError(
                f"the tokenizer has ids up to {last}, the model only {vocab_size} rows: they do not belong together"
            )
        return self._with(eos=tuple(eos), vocab_size=vocab_size)

    def showing(self, marks: Iterable[str]) -> "Tokenizer":
        """Return this tokenizer with special tokens as a part of texts: marks that are read in answers."""
        return self._with(shown=marks)

    def _with(self, **changed: Any) -> "Tokenizer":
        own = {name: getattr(self, name) for name in ("eos", "bos", "template", "vocab_size", "shown")}
        return Tokenizer(self.backend, **own | changed)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode a text as token ids.

        Args:
            text: text to encode; special tokens in it, such as `<|im_end|>`, become one token.
            special: put what the tokenizer wants around a text, such as a first token. A chat's template has done
                so already.

        Raises:
            ConfigError: for half a surrogate pair, as a command line has one for a byte that is no UTF-8.

        """
        try:
            # Of several, since of one `tokenizers` holds Python's lock, and a server's other threads, for seconds.
            return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeError):
            halves = "half a surrogate pair, or a byte that is not UTF-8"
            raise ConfigError(f"the text has {halves}: expected a text of whole characters") from None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode token ids; bytes that are not UTF-8 and unknown ids become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to the text, possibly part of a character; empty for padding ids.

        Raises:
            IndexError: for an id that the model does not have.

        """
        return self._bytes[token]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """A conversation as the prompt that the model was trained on; encode it with `special=False`.

        Args:
            messages: dicts with `role` and `content`, from `fullstride.llm.text.messages.plain_messages`.
            tools: JSON schemas of functions, as in OpenAI's API.
            add_generation_prompt: whether the prompt ends with the beginning of the assistant's message.
            kwargs: other variables of the template, such as `enable_thinking`.

        Raises:
            ConfigError: if the model has no template, or its template refuses the conversation.
            NoPlaceForToolsError: if the template leaves out the tools.

        """
        if self.template is None:
            raise ConfigError("this model has no chat template: pass a text instead of messages")
        text = self.template.render(messages, tools, add_generation_prompt, **kwargs)
        if tools and text == self.template.render(messages, None, add_generation_prompt, **kwargs):
            raise NoPlaceForToolsError(
                "this model's chat template has no place for tools: it was not trained to call them"
            )
        return text

    @cached_property
    def _bytes(self) -> list[bytes]:
        kinds = {decoder["type"] for decoder in self._decoders}
        if not kinds & {"ByteLevel", "ByteFallback"}:
            raise ConfigError(f"the tokenizer's decoder is {', '.join(sorted(kinds)) or 'none'}; expected {SUPPORTED}")
        convert = _byte_level if "ByteLevel" in kinds else _sentence_piece
        table = [b""] * self.vocab_size
        for text, token in self.backend.get_vocab(with_added_tokens=True).items():
            table[token] = convert(text)
        # Added tokens are decoded as they are written, but for byte-level ones, which are as all others.
        if convert is not _byte_level:
            for token, added in self.backend.get_added_tokens_decoder().items():
                table[token] = added.content.encode()
        return table

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """Steps of the decoder, as in tokenizer.json."""
        if self.backend.decoder is None:
            return []
        decoder = json.loads(self.backend.decoder.__getstate__())
        return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]

    @cached_property
    def special_texts(self) -> Mapping[int, str]:
        """How a prompt spells special tokens, which are not part of the text, by their ids.

        Bytes of a byte-level tokenizer's may be others, and no UTF-8.
        """
        return {token: text for text, token in self.special_spellings.items() if text not in self.shown}

    @cached_property
    def special_spellings(self) -> Mapping[str, int]:
        """Ids of all special tokens, also of those that are a part of texts, by their texts in prompts."""
        added = self.backend.get_added_tokens_decoder().items()
        return {made.content: token for token, made in added if made.special and made.content}

    def beginning(self, after: Sequence[int] = ()) -> TextPrefix:
        """How a text begins that comes after these tokens, so that theirs and it are the text of all of them.

        Args:
            after: of a prompt; where they have text, the first space after it is one between words and stays.

        """
        text = (token for token in after if token not in self.special_texts)
        strips = self._strips and not any(map(self.token_bytes, text))
        return TextPrefix(strips, self._half_character(after))

    def _half_character(self, ids: Sequence[int]) -> bytes:
        """Bytes at the end of what the ids say that are the beginning of a character; a mark ends every character."""
        tail, place = b"", len(ids) - 1
        while place >= 0 and len(tail) < MOST_OF_A_CHARACTER and ids[place] not in self.special_texts:
            tail = self.token_bytes(ids[place]) + tail
            place -= 1
        characters = Utf8Decoder()
        characters.push(tail[-MOST_OF_A_CHARACTER:])
        return characters.half

    @cached_property
    def _strips(self) -> bool:
        """Return whether decoding removes a text's first space, which SentencePiece adds."""
        steps = (each for each in self._decoders if each["type"] == "Strip")
        return any(each["content"] == " " and each["start"] for each in steps)


class Detokenizer:
    """Incremental detokenizer: all pushes and the flush together return the text that `decode` gives for all ids.

    Each token's bytes are looked at once, so a text costs time in proportion to its length. A character of which
    bytes are missing yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, after: Sequence[int] = ()):
        """Start a text, by default without the tokens that are marks.

        Args:
            tokenizer: tokenizer of the tokens.
            skip_special: whether to leave out special tokens.
            after: tokens that precede the text; see `Tokenizer.beginning`.

        """
        self._table = tokenizer._bytes
        self._skipped = tokenizer.special_texts if skip_special else ()
        self._characters = Utf8Decoder(tokenizer.beginning(after))

    def push(self, ids: Iterable[int]) -> str:
        """Add a token and return the text that is final now and was not before."""
        return self._characters.push(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        """Return the text held back at the end; half a character becomes U+FFFD."""
        return self._characters.flush()

    def _bytes_of(self, token: int) -> bytes:
        if token in self._skipped:
            return b""
        return self._table[token] if 0 <= token < len(self._table) else b"\xef\xbf\xbd"


def _byte_level(text: str) -> bytes:
    try:
        return bytes(map(ALPHABET.__getitem__, text))
    except KeyError:
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(text)
    return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()

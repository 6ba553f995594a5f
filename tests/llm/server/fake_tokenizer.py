"""Bytes are tokens; three more are marks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.text.utf8_stream import TextPrefix

END, START, ASSISTANT = 256, 257, 258
MARKS = {END: b"<end>", START: b"<start>", ASSISTANT: b"<assistant>"}


class FakeTokenizer(Tokenizer):
    """Tokenizer of 259 tokens without a backend."""

    vocab_size = 259
    eos = (END,)
    template = None
    # What the template writes where the assistant is to speak.
    ending = ""

    def __init__(self):
        """Nothing to keep."""

    @cached_property
    def special_spellings(self) -> Mapping[str, int]:
        return {}

    @cached_property
    def special_texts(self) -> Mapping[int, str]:
        return {token: text.decode() for token, text in MARKS.items()}

    def showing(self, marks: Iterable[str]) -> "FakeTokenizer":
        return self

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [START] * special + list(text.encode())

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return b"".join(b"" if skip_special and i >= END else self.token_bytes(i) for i in ids).decode(errors="replace")

    def beginning(self, after: Sequence[int] = ()) -> TextPrefix:
        return TextPrefix(strips=False)

    def token_bytes(self, token: int) -> bytes:
        return MARKS.get(token) or bytes([token])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        if kwargs.get("refuse"):
            raise ConfigError("the model's chat template refuses these messages: so it was told")
        lines = [f"[tools {','.join(tool['function']['name'] for tool in tools)}]\n"] if tools else []
        lines += [f"{message['role']}: {message['content'] or ''}\n" for message in messages]
        return "".join(lines) + ("assistant: " + self.ending) * add_generation_prompt

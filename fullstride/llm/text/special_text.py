"""Special tokens that a conversation spells, such as `<|im_end|>`, as text: only the chat template writes real ones."""

import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from fullstride.llm.text.tokenizer import Tokenizer


class SpecialText:
    """Special tokens in conversations, replaced by placeholders until the template has written its own."""

    def __init__(self, tokenizer: Tokenizer):
        """Serve a tokenizer."""
        self._tokenizer = tokenizer
        # No client can know it.
        self._nonce = secrets.token_hex(16)
        self._texts = sorted(tokenizer.special_spellings, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._placeholder = re.compile(rf"\[{self._nonce}:(\d+)\]")

    def hide(self, value: Any) -> Any:
        """Return a value, such as messages, with placeholders for special tokens in all of its texts."""
        if isinstance(value, str):
            return self._any.sub(lambda found: f"[{self._nonce}:{self._texts.index(found[0])}]", value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def shown(self, rendered: str) -> str:
        """Return a rendered conversation as it would be without placeholders."""
        return self._placeholder.sub(lambda found: self._texts[int(found[1])], rendered)

    def encode(self, rendered: str, special: bool = False) -> list[int]:
        """Encode a rendered conversation: its own special tokens are tokens, those of placeholders are text.

        Args:
            rendered: with placeholders.
            special: see `Tokenizer.encode`.

        """
        if self._nonce not in rendered:
            return self._tokenizer.encode(rendered, special)
        backend, ids = self._backend
        marked = self._any.sub(lambda found: f"[{self._nonce}]{found[0]}", rendered)
        found = backend.encode_batch_fast([self.shown(marked)], add_special_tokens=special)[0].ids
        return [ids.get(token, token) for token in found]

    @cached_property
    def _backend(self) -> tuple[tokenizers.Tokenizer, Mapping[int | None, int]]:
        """A tokenizer that takes special tokens for text, and knows them by other names; and their ids by its own."""
        backend = tokenizers.Tokenizer.from_str(self._tokenizer.backend.to_str())
        backend.encode_special_tokens = True
        ids: dict[int | None, int] = {}
        for token, made in self._tokenizer.backend.get_added_tokens_decoder().items():
            if made.special:
                kept = {name: getattr(made, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
                name = f"[{self._nonce}]{made.content}"
                backend.add_tokens([tokenizers.AddedToken(name, special=False, **kept)])
                ids[backend.token_to_id(name)] = token
        return backend, ids

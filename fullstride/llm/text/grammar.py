"""Structured output: tokens that may come next in a text that conforms to a JSON schema, regex or grammar."""

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any

import llguidance
import numpy as np
import tokenizers
from jaxtyping import UInt32

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.text.json_schema import supported
from fullstride.llm.text.tokenizer import Tokenizer

MOST_BYTES = 65_536
# Compiled grammars that are kept for the next request with the same one: so many, and of so many bytes in all. Of one
# that was not tried out, the bytes are guessed from its text's.
KEPT, KEPT_BYTES = 64, 256 << 20
LEAST_BYTES, BYTES_OF_TEXT = 1 << 18, 32
# At one or two kilobytes each these states are the memory that a hostile expression may take; llguidance's own limit is
# 250,000. Its limit of 2,000 items stays: an ambiguous grammar that fills its rows holds all up at each of its tokens.
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000)
# An object has four items for each property that may be left out, and a schema has room for about 1,800 of those.
WIDE = llguidance.LLParserLimits(max_lexer_states=50_000, max_items_in_row=10_000)
# JSON allows whitespace without end, and a small model can be caught in it.
WHITESPACE = r"[ \n\t]{1,24}"
# What a grammar does not hold is passed over; see `fullstride.llm.text.json_schema`.
GUIDANCE: Any = {"whitespace_pattern": WHITESPACE, "lenient": True}
# llguidance's message if no token may come next.
NO_TEXT = "NoExtensionBias"


class Compiler:
    """Compiler of matchers for a tokenizer's texts; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer):
        """Sort the tokenizer's tokens, which takes about a second for 150 thousand of them.

        Raises:
            ConfigError: if the tokenizer has no end token, with which a text could be ended.

        """
        if not tokenizer.eos:
            raise ConfigError("structured output needs an end token, and this model's tokenizer has none")
        self._tokenizer, self._lock = tokenizer, Lock()
        self.words = GrammarVocabulary(tokenizer)
        self._sorted = self.words.sorted()
        self._made: OrderedDict[Structured, Future[llguidance.LLMatcher]] = OrderedDict()
        self._bytes: dict[Structured, int] = {}

    def keeps(self, structured: Structured) -> bool:
        """Return whether a constraint is already compiled; if so it stays cached for longer."""
        with self._lock:
            made = self._made.get(structured)
            if made is None or not made.done():
                return False
            self._made.move_to_end(structured)
            return True

    def matcher(self, structured: Structured, size: int | None = None) -> "Matcher":
        """A matcher at the start of a text; one that was made before is copied, and one that is being made awaited.

        Args:
            structured: constraint on the text.
            size: bytes of the compiled constraint, if known.

        Raises:
            ConfigError: if the schema, expression or grammar is too long, cannot be satisfied or is not understood,
                with llguidance's reason.

        """
        with self._lock:
            first = structured not in self._made
            made = self._made.setdefault(structured, Future())
            self._made.move_to_end(structured)
            guess = BYTES_OF_TEXT * len(structured.value) if size is None else size
            self._bytes.setdefault(structured, max(LEAST_BYTES, guess))
        if first:
            # Not under the lock: who asks for another shape, such as the engine, must not wait for a costly one.
            self._make(structured, made)
        inner = made.result()
        with self._lock:
            return Matcher(inner.deep_copy(), self._tokenizer)

    def _make(self, structured: Structured, made: Future[llguidance.LLMatcher]) -> None:
        try:
            made.set_result(self._compile(structured))
        except BaseException as error:
            # Forgotten before anybody hears of it: who asks again has it compiled again.
            with self._lock:
                if self._made.get(structured) is made:
                    self._forget(structured)
            made.set_exception(error)
        with self._lock:
            while len(self._made) > KEPT or sum(self._bytes.values()) > KEPT_BYTES:
                self._forget(next(iter(self._made)))

    def _forget(self, structured: Structured) -> None:
        del self._made[structured], self._bytes[structured]

    def _compile(self, structured: Structured) -> llguidance.LLMatcher:
        return compiled(self._sorted, structured)


class Matcher:
    """Where a text stands in its grammar."""

    def __init__(self, inner: llguidance.LLMatcher, tokenizer: Tokenizer):
        """Wrap llguidance's matcher; use `Compiler.matcher`."""
        self._inner, self._tokenizer = inner, tokenizer

    def mask(self) -> UInt32[np.ndarray, " words"]:
        """The tokens that may come next, bit i % 32 of word i // 32 for id i, in ceil(vocab_size / 32) words.

        Once the text is complete these are the end tokens.

        Raises:
            ConfigError: if the grammar proves too costly at this place.

        """
        words = -(-self._tokenizer.vocab_size // 32)
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint32)[:words]
        self._check()
        return bits

    def advance(self, token: int) -> bool:
        """Go on by a token; where it is not allowed, stay and return False.

        Raises:
            ConfigError: see `mask`.

        """
        if self.done:
            return token in self._tokenizer.eos
        accepted = self._inner.try_consume_tokens([token]) == 1
        self._check()
        return accepted

    def _check(self) -> None:
        if self._inner.is_error():
            raise ConfigError(f"structured output cannot go on: {_reason(self._inner)}")

    @property
    def done(self) -> bool:
        """Return whether the text is complete: only an end token may follow."""
        return self._inner.is_stopped()


def compiled(tokenizer: llguidance.LLTokenizer, structured: Structured) -> llguidance.LLMatcher:
    """Compile a constraint to a matcher at the start of a text.

    Raises:
        ConfigError: see `Compiler.matcher`.

    """
    size = len(structured.value.encode())
    if size > MOST_BYTES:
        raise ConfigError(f"{structured.kind} of {size} bytes: expected at most {MOST_BYTES}")
    limits = WIDE if structured.wide or structured.kind in SCHEMAS else LIMITS
    made = llguidance.LLMatcher(tokenizer, GRAMMARS[structured.kind](structured.value), log_level=0, limits=limits)
    if made.is_error():
        raise ConfigError(f"{structured.kind} is not accepted: {_one_line(made.get_error())}")
    # Here and not in the engine's thread: the first mask of a costly shape takes seconds, and copies have it.
    first = made.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.uint8)
    if not first.is_error() and mask.any():  # rows that are too wide show with the first token that is taken
        first.try_consume_tokens([int(np.unpackbits(mask, bitorder="little").argmax())])
    if first.is_error():
        reason = _reason(first)
        reason = "no text conforms to it" if reason == NO_TEXT else reason
        raise ConfigError(f"{structured.kind} is not accepted: {reason}")
    return made


class GrammarVocabulary:
    """Picklable tokenizer in the form that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer):
        # A copy: texts that a shape prescribes are never marks, even where they spell one as a prompt may.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True
        self.eos_token_id, self.bos_token_id = tokenizer.eos[0], tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_texts)
        self._ends = list(tokenizer.eos)

    def sorted(self) -> llguidance.LLTokenizer:
        """The tokens as llguidance looks them up."""
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._ends)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._backend.encode(text, add_special_tokens=False).ids


def _from_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema is {type(schema).__name__}: expected a JSON object")
    try:
        made = supported(schema).schema
        if made is not False:
            text = json.dumps(made, ensure_ascii=False)
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=GUIDANCE)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema is not accepted: {_one_line(str(error))}") from error
    raise ConfigError("json_schema is not accepted: no text conforms to it")


def _from_regex(text: str) -> str:
    """Compile a regex in the syntax of Rust's regex crate, except that a digit is 0 to 9 and not any of Unicode's.

    Raises:
        ConfigError: for a backslash at its end, which llguidance would drop.

    """
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ConfigError("regex is not accepted: it ends in a backslash; expected a character after it")
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/")


GRAMMARS: dict[str, Callable[[str], str]] = {
    "json_schema": _from_schema,
    "json_object": lambda _: _from_schema('{"type": "object"}'),
    "regex": _from_regex,
    "grammar": llguidance.LLMatcher.grammar_from_lark,
}
SCHEMAS = ("json_schema", "json_object")


def _reason(failed: llguidance.LLMatcher) -> str:
    # What follows is the parser's state, and the text so far.
    return _one_line(failed.get_error().partition("<state>")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""Validation of requests: a request that could never run is rejected before it is queued."""

import operator
import os
from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.programs import TOP
from fullstride.llm.engine.sequence import Request, Sequence, StopTextBuffer
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.engine.wire import BIASES, STOPS
from fullstride.llm.sampling_params import SamplingParams

SEED_BYTES = 16


class RequestValidator:
    """Validator of requests, which turns them into sequences."""

    def __init__(self, model: ModelConfig, sizes: CompiledShapes, tokenizer: Any):
        """Validate for an engine of these sizes; without a tokenizer there is neither text nor grammar."""
        self.model, self.sizes, self.tokenizer = model, sizes, tokenizer

    def request(self, name: str, prompt: Iterable[int], params: SamplingParams, arrived: float | None) -> Request:
        """Check a request.

        Raises:
            ConfigError: saying what it asks for, and what this engine can do.

        """
        tokens = list(map(operator.index, prompt))
        _check_ids("prompt", tokens, self.model.vocab_size)
        limit = self._limit(len(tokens), params)
        if params.min_tokens > limit - len(tokens):
            raise ConfigError(
                f"min_tokens={params.min_tokens}: after a prompt of {len(tokens)} tokens there is room for"
                f" {limit - len(tokens)}; request at most that many"
            )
        _check_params(params, self.model, self.tokenizer)
        return Request(name, tokens, params, limit, _stops(params, self.model), arrived)

    def sequences(self, request: Request) -> list[Sequence]:
        """Create a sequence for each completion.

        Raises:
            ConfigError: for a grammar that is not understood.

        """
        params = request.params
        seed = os.urandom(SEED_BYTES) if params.seed is None else str(params.seed).encode()[:64]
        found = []
        for index in range(params.n):
            detokenizer = None
            if self.tokenizer is not None:
                from fullstride.llm.text.tokenizer import Detokenizer

                detokenizer = Detokenizer(self.tokenizer, after=request.prompt)
            text = StopTextBuffer(detokenizer, params.stop or (), params.include_stop_str_in_output)
            sequence = Sequence(request, index, list(request.prompt), key(seed, index), text)
            if params.structured_outputs is not None:
                sequence.matcher = self.grammars.matcher(params.structured_outputs)
            if params.bad_words and self.tokenizer is not None:
                from fullstride.llm.text.bad_words import BadWordsMatcher, word_tokens

                words = word_tokens(params.bad_words, self.tokenizer)
                sequence.matcher = BadWordsMatcher(words, self.model.vocab_size, sequence.matcher)
            if sequence.matcher is not None:
                sequence.mask = sequence.matcher.mask()
            if params.prompt_logprobs is not None and index == 0:
                sequence.prompt_logprobs = [None for _ in request.prompt]
            found.append(sequence)
        return found

    def _limit(self, prompt: int, params: SamplingParams) -> int:
        """Return the tokens that the sequence may have; the KV cache must hold them, too."""
        wanted = total_length(prompt, params.max_tokens, self.sizes.max_length)
        holds = self.sizes.holds
        if params.max_tokens is None:
            wanted = min(wanted, holds)
        if wanted > holds or prompt >= wanted:
            raise ConfigError(f"{max(wanted, prompt + 1)} tokens in all never fit: the engine's pool holds {holds}")
        return wanted

    @cached_property
    def grammars(self) -> Any:
        """Compiler of grammars, which caches some of them.

        Raises:
            ConfigError: if the tokenizer names no end token.

        """
        from fullstride.llm.text.grammar import Compiler

        return Compiler(self.tokenizer)


def _check_ids(what: str, ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise ConfigError(f"{what} has the token id {token}: this model's ids are 0 to {vocab - 1}")


def total_length(prompt: int, max_tokens: int | None, most: int) -> int:
    """Return the tokens that a sequence may have.

    Args:
        prompt: number of tokens of the prompt.
        max_tokens: output tokens, at most; None for as many as fit.
        most: tokens of the longest possible sequence.

    Raises:
        ConfigError: if they are too many, or the prompt has none.

    """
    if prompt < 1:
        raise ConfigError("the prompt is empty: expected at least one token")
    if prompt >= most:
        raise ConfigError(f"the prompt has {prompt} tokens: expected at most {most - 1}, with one to follow")
    wanted = most if max_tokens is None else prompt + max_tokens
    if wanted > most:
        raise ConfigError(
            f"{prompt} tokens of prompt and max_tokens={max_tokens} are {wanted}: expected at most {most} in all"
        )
    return wanted


def _check_params(params: SamplingParams, model: ModelConfig, tokenizer: Any) -> None:
    _check_ids("logit_bias", params.logit_bias or (), model.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids or (), model.vocab_size)
    most = {
        "logit_bias": (len(params.logit_bias or ()), BIASES, "entries"),
        "stop_token_ids": (len(_stops(params, model)), STOPS, "ids with the model's own"),
        "logprobs": (params.logprobs or 0, TOP, "a token"),
        "prompt_logprobs": (params.prompt_logprobs or 0, TOP, "a token"),
    }
    for name, (given, limit, unit) in most.items():
        if given > limit:
            raise ConfigError(f"{name} needs {given}: expected at most {limit} {unit}")
    if tokenizer is None and (params.stop or params.structured_outputs or params.bad_words):
        raise ConfigError("stop texts, bad_words and structured output need a tokenizer, and this engine has none")


def _stops(params: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    # A grammar that is complete allows nothing but the end token.
    own = () if params.ignore_eos and params.structured_outputs is None else model.eos
    return tuple(dict.fromkeys((*own, *(params.stop_token_ids or ()))))


def key(seed: bytes, index: int) -> tuple[int, int]:
    """Return the random key of a completion, two 32-bit integers; a token's position is folded in later."""
    found = blake2b(index.to_bytes(8, "little"), key=seed, digest_size=8).digest()
    return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:], "little")

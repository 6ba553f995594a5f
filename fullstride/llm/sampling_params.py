"""Sampling parameters and stop conditions of a request."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from fullstride.errors import ConfigError, one_of
from fullstride.llm.vllm_names import SAMPLING_BEFORE
from fullstride.renamed import accepts

COUNTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")  # may be None
# What fp32 computes with on the device, with room for sums and products of it.
LARGEST, SMALLEST = 1e30, 1e-30
SIZED = f"at most {LARGEST:g} in size"
NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

Shape = Literal["json_schema", "json_object", "regex", "grammar"]


class ParamError(ConfigError):
    """Error in a field of `SamplingParams`, or in a part of a message.

    Attributes:
        param, value, expected: name of the field, or a place such as `messages.0.content`; what was received;
            what is allowed.

    """

    def __init__(self, param: str, value: object, expected: str):
        """Compose the message from the three attributes."""
        super().__init__(f"{param}={value!r}: expected {expected}")
        self.param, self.value, self.expected = param, value, expected


@dataclass(frozen=True)
class Structured:
    """Constraint on the generated text.

    Attributes:
        kind: `json_schema`, `json_object` (any object), `regex`, or `grammar` (Lark, as llguidance reads it).
        value: the schema, expression or grammar as text; empty for `json_object`.
        wide: whether a grammar may have 10,000 alternatives at once, like a schema, instead of 2,000; an ambiguous one
            then delays all requests at each of its tokens, so do not set it for untrusted grammars.

    """

    kind: Shape
    value: str = ""
    wide: bool = False

    def __post_init__(self):
        """Validate the kind, and that the value is a text.

        Raises:
            ConfigError: saying what was expected.

        """
        one_of("structured output", self.kind, get_args(Shape))
        if not isinstance(self.value, str):
            found = type(self.value).__name__
            raise ConfigError(f"{self.kind} is {found}: expected a text; use json.dumps for a schema")


@accepts(SAMPLING_BEFORE, deprecated=True)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request, by vLLM's names and with its defaults.

    Attributes:
        n: number of completions per prompt.
        temperature: 0 is greedy: the most probable token, the lowest id among equals.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to this or more.
        min_p: keep tokens of at least this share of the largest probability.
        repetition_penalty: divisor of positive and factor of negative logits of tokens in the prompt or the output.
        presence_penalty: value subtracted from the logits of tokens in the output.
        frequency_penalty: value subtracted once for each occurrence of the token in the output.
        logit_bias: values added to logits, by token id.
        seed: seed of the request, which gives the same tokens in any batch; -1 means None, as in vLLM.
        stop: texts that end the output and are removed from it.
        stop_token_ids: token ids that end the output.
        ignore_eos: whether to continue after the model's end token.
        max_tokens: tokens of the output, at most; None allows as many as fit the context.
        min_tokens: tokens before which no end or stop token is chosen (unless structured output allows no other)
            and no stop text ends the output.
        logprobs: number of most probable tokens to report at each position besides the chosen one; None reports none.
        prompt_logprobs: number of most probable tokens to report at each position of the prompt.
        structured_outputs: constraint that the output must satisfy.
        bad_words: words that the output does not have; all requests then decode one token per dispatch.
        include_stop_str_in_output: whether the output ends with the stop text, or the text of the stop token.

    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Structured | None = None
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None

    def __post_init__(self):
        """Validate and normalize the fields: stops become tuples, and a seed of -1 becomes None.

        Raises:
            ParamError: with the field, the value received and the values allowed.
            ConfigError: likewise, for a number or an id of the wrong kind.

        """
        # A one-shot iterable, such as a generator, would be empty after the checks.
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if name == "stop" and isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        self._check_types()
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        limits = {
            "n": self.n >= 1 or "1 or more",
            "temperature": 0 <= self.temperature <= LARGEST or f"from 0 to {LARGEST:g}",
            "top_k": self.top_k >= -1 or "a count, 0 or -1 for all",
            "top_p": 0 < self.top_p <= 1 or "above 0, at most 1",
            "min_p": 0 <= self.min_p <= 1 or "from 0 to 1",
            "repetition_penalty": SMALLEST <= self.repetition_penalty <= LARGEST or f"from {SMALLEST:g} to {LARGEST:g}",
            "presence_penalty": abs(self.presence_penalty) <= LARGEST or SIZED,
            "frequency_penalty": abs(self.frequency_penalty) <= LARGEST or SIZED,
            "logit_bias": all(abs(x) <= LARGEST for x in (self.logit_bias or {}).values()) or f"{SIZED} by token id",
            "stop": all(isinstance(text, str) and text for text in self.stop or ()) or "texts that are not empty",
            "bad_words": all(isinstance(word, str) and word.strip() for word in self.bad_words or ()) or "words",
            "max_tokens": self.max_tokens is None or self.max_tokens >= 1 or "1 or more, or None",
            "min_tokens": 0 <= self.min_tokens <= (self.max_tokens or math.inf) or "from 0 to max_tokens",
            "logprobs": self.logprobs is None or self.logprobs >= 0 or "0 or more, or None",
            "prompt_logprobs": self.prompt_logprobs is None or self.prompt_logprobs >= 0 or "0 or more, or None",
        }
        for name, fine in limits.items():
            if fine is not True:
                raise ParamError(name, getattr(self, name), str(fine))

    def _check_types(self) -> None:
        """Check the types of numbers: a wrong one would be truncated on the device."""
        for name in (*COUNTS, *NUMBERS):
            value, kind = getattr(self, name), Integral if name in COUNTS else Real
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected {'an integer' if kind is Integral else 'a number'}")
        kinds = {"logit_bias": Mapping, "stop": Iterable, "stop_token_ids": Iterable, "bad_words": tuple}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind | None):
                raise ConfigError(f"{name}={value!r}: expected a {'dict' if kind is Mapping else 'list'}, or None")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name) or ():
                # A truncated id on the device would differ from the one that the host waits for.
                if not isinstance(token, Integral):
                    raise ConfigError(f"{name}={token!r}: expected token ids, which are integers")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, Real):
                raise ConfigError(f"logit_bias={{{token}: {bias!r}}}: expected numbers by token id")
        if not isinstance(self.structured_outputs, Structured | None):
            raise ConfigError(f"structured_outputs={self.structured_outputs!r}: expected Structured(kind, value)")

"""Settings of speculative decoding, by vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from fullstride.errors import ConfigError, one_of

METHODS = ("ngram", "draft_model")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, for the model to verify several in one step; the names are vLLM's.

    Attributes:
        method: `ngram` looks up what followed the newest tokens earlier in the prompt or the output; `draft_model` asks
            a smaller model.
        num_speculative_tokens: tokens of a draft, at most.
        prompt_lookup_min: newest tokens that have to be found again, at least; for `ngram`.
        prompt_lookup_max: newest tokens that are looked for, at most; for `ngram`.
        model: folder, GGUF file or name of the draft model, whose vocabulary has to be the model's; for `draft_model`.

    """

    method: str = "ngram"
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: str | None = None

    def __post_init__(self):
        """Validate the settings.

        Raises:
            ConfigError: naming the field.

        """
        one_of("speculative_config: method", self.method, METHODS)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"speculative_config: {name}={value!r}: expected an integer, 1 or more")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            given = f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}"
            raise ConfigError(f"speculative_config: {given}: expected a minimum that is not above the maximum")
        if (self.model is not None) != (self.method == "draft_model"):
            raise ConfigError(
                f"speculative_config: method={self.method}, model={self.model}: a model is given for draft_model alone"
            )

    @classmethod
    def of(cls, given: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """Return the settings of a mapping, as vLLM's `speculative_config` is one.

        Raises:
            ConfigError: for a key that there is not, or a value that cannot be.

        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config={given!r}: expected a dict such as {{'method': 'ngram'}}")
        for name in given:
            one_of("setting of speculative_config", name, [field.name for field in fields(cls)])
        values = dict(given)
        if "model" in values:
            values.setdefault("method", "draft_model")
        for one, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
            if one in values:
                values.setdefault(other, values[one])
        return cls(**values)

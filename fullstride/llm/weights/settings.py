"""A JSON object's values, each checked to be what the engine computes with; and how a model's makers would have its
tokens chosen, if its files say so.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import SamplingParams

# What sizes, positions and token ids fit into.
LARGEST = 2**31 - 1
# Of generation_config.json, by the names that `SamplingParams` has, too; vLLM takes the same ones from it.
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
IN_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


class CheckedSettings:
    """Values of one object in a file; every reader raises ConfigError, naming the file, the key and what is there."""

    def __init__(self, file: Path, raw: dict[str, Any], prefix: str = ""):
        """Read these values; messages show their keys after `prefix`."""
        self.file, self.raw, self._prefix = file, raw, prefix

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number below 2^31; the default if it is null or absent."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self._refused(key, value, "a positive whole number below 2^31")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """Return a positive number; the default if it is null or absent."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self._refused(key, value, "a positive number")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, given as a list, as one number, or absent."""
        value = self.raw.get(key)
        found = value if isinstance(value, list) else () if value is None else (value,)
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
            raise self._refused(key, value, "token ids")
        return tuple(found)

    def inner(self, key: str) -> "CheckedSettings":
        """Return the object under a key; an empty one if it is null or absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._refused(key, value, "an object")
        return CheckedSettings(self.file, value, f"{self._prefix}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _refused(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._prefix}{key}={shortened(value)}: expected {expected}")


def shortest(value: float) -> float:
    """Return the shortest decimal of a float32 value: 1e-5 and not 9.999999747e-6."""
    return float(str(np.float32(value)))


def shortened(value: Any) -> str:
    """Format a value as a text that fits a line."""
    text = str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def gguf_sampling(path: Path, metadata: dict[str, Any]) -> dict[str, int | float]:
    """The sampling that a GGUF names under general.sampling.

    Raises:
        ConfigError: for values that cannot be.

    """
    start = "general.sampling."
    found = {
        key.removeprefix(start): shortest(value) if isinstance(value, float) else value
        for key, value in metadata.items()
        if key.startswith(start)
    }
    return checked_sampling(path, {IN_GGUF.get(name, name): value for name, value in found.items()})


def in_words(sampling: Mapping[str, int | float]) -> str:
    """Format sampling parameters as `temperature=0.6, top_k=20`."""
    return ", ".join(f"{name}={value:g}" for name, value in sampling.items())


def checked_sampling(file: Path, values: dict[str, Any]) -> dict[str, int | float]:
    """The sampling that a file names, in generation_config.json's way.

    Raises:
        ConfigError: for values that cannot be.

    """
    found = {name: values[name] for name in NAMES if values.get(name) is not None}
    try:
        for name, value in found.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > sys.float_info.max:
                raise ConfigError(f"{name}={shortened(repr(value))}: expected a number")
            found[name] = value if name == "top_k" else float(value)  # JSON's 1 is a float here
        SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return found

"""How a model's makers would have its tokens chosen, where its files say so."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights.settings import shortened, shortest

# Of generation_config.json, by the names that `SamplingParams` has, too; vLLM takes the same ones from it.
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
IN_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def of_gguf(path: Path, metadata: dict[str, Any]) -> dict[str, int | float]:
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
    return checked(path, {IN_GGUF.get(name, name): value for name, value in found.items()})


def in_words(sampling: Mapping[str, int | float]) -> str:
    """As in `temperature=0.6, top_k=20`."""
    return ", ".join(f"{name}={value:g}" for name, value in sampling.items())


def checked(file: Path, values: dict[str, Any]) -> dict[str, int | float]:
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

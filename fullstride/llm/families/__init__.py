"""Families of language models: one file and one row each."""

from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.llm.families import llama, qwen2, qwen3
from fullstride.llm.families.family import Family, PreTokenizer

__all__ = ["FAMILIES", "Family", "PreTokenizer", "family_of"]
FAMILIES: dict[str, Family] = {"llama": llama.FAMILY, "qwen2": qwen2.FAMILY, "qwen3": qwen3.FAMILY}


def family_of(file: Path, key: str, name: object) -> Family:
    """Return the model family that a file names under a key.

    Raises:
        ConfigError: if there is none of that name.

    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"{file}: {key}={name}: expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]

"""Families of language models: one file and one row each."""

from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.llm.families import (
    gemma2,
    gemma3,
    gemma3_multimodal,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from fullstride.llm.families.family import Family
from fullstride.llm.families.words import PreTokenizer

__all__ = ["FAMILIES", "Family", "PreTokenizer", "family_of", "gguf_family"]
FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "mistral": mistral.FAMILY,
    "smollm3": smollm3.FAMILY,
    "granite": granite.FAMILY,
    "phi3": phi3.FAMILY,
    "olmo2": olmo2.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "gemma3": gemma3_multimodal.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
}


def family_of(file: Path, key: str, name: object) -> Family:
    """Return the model family that a file names under a key.

    Raises:
        ConfigError: if there is none of that name.

    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"{file}: {key}={name}: expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def gguf_family(file: Path, name: object, experts: bool = False) -> tuple[str, Family]:
    """Return the model family of a GGUF file's architecture, and its own name.

    llama.cpp has one name for Llama and for Mixtral, which differ in that the latter has experts.

    Raises:
        ConfigError: if there is none, or GGUF files of it are not read.

    """
    names = {family.gguf: ours for ours, family in FAMILIES.items() if family.gguf and not family.expert_tensors}
    with_experts = {family.gguf: ours for ours, family in FAMILIES.items() if family.gguf and family.expert_tensors}
    names = {**names, **with_experts} if experts else {**with_experts, **names}
    if not isinstance(name, str) or name not in names:
        raise ConfigError(f"{file}: general.architecture={name}: expected one of {', '.join(names)}")
    return names[name], FAMILIES[names[name]]

"""Paged-attention engine in JAX for Qwen and Llama models, offline and behind an OpenAI-compatible API."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullstride.llm.engine import Engine, EngineConfig
    from fullstride.llm.llm import LLM
    from fullstride.llm.sampling_params import SamplingParams, Structured

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "Structured"]
_HOMES = {"LLM": "llm", "Engine": "engine", "EngineConfig": "engine"}


def __getattr__(name: str) -> Any:
    """Import a name on first access: the command line needs no JAX to show its help."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'sampling_params')}"), name)

"""The engine that runs requests: continuous batching over a paged KV cache."""

from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]

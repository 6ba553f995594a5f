"""The engine that runs requests: continuous batching over a paged pool of keys and values."""

from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]

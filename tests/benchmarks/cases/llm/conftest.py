"""Fixtures with the models of the engine's own tests."""

from pathlib import Path

import pytest

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.weights import load
from tests.llm.conftest import compiled_soon, smollm2, tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3  # noqa: F401
from tests.llm.tiny import QWEN3


@pytest.fixture(scope="session")
def one_layer(tiny_model) -> Path:  # noqa: F811 # a fixture
    """A model that compiles faster than a deeper one."""
    return tiny_model("qwen3", **QWEN3, num_hidden_layers=1)


@pytest.fixture(scope="session")
def idle(one_layer) -> Engine:
    """An engine of that model, built once."""
    loaded = load(one_layer, dtype="float32")
    return Engine(loaded, EngineConfig(max_sequences=4, max_length=150, kv_blocks=60, prefix_cache=False))

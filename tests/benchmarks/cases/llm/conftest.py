"""Fixtures with the models of the engine's own tests."""

from pathlib import Path

import pytest

from tests.llm.conftest import compiled_soon, smollm2, tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3  # noqa: F401
from tests.llm.tiny import QWEN3


@pytest.fixture(scope="session")
def one_layer(tiny_model) -> Path:  # noqa: F811 # a fixture
    """A model that compiles faster than a deeper one."""
    return tiny_model("qwen3", **QWEN3, num_hidden_layers=1)

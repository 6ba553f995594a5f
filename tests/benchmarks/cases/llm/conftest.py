"""Fixtures with the models of the engine's own tests."""

from tests.llm.conftest import compiled_soon, smollm2, tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3  # noqa: F401

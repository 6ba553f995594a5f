"""Models that commands of other areas are tried with."""

from tests.llm.conftest import compiled_soon, smollm2, tiny_llama, tiny_model, tiny_qwen3  # noqa: F401, fixtures

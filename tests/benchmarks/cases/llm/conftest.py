"""The models of the engine's own tests."""

from tests.helpers.compiled_soon import compiled_soon as optimised_little  # noqa: F401, fixtures
from tests.llm.conftest import compiled_soon, smollm2, tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3  # noqa: F401

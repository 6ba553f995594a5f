"""The engine's own tests run on an engine of two devices."""

from dataclasses import replace
from typing import Any

import pytest

from fullstride.llm.engine import Engine
from fullstride.llm.weights import load
from tests.llm.engine.conftest import TIGHT, engine  # noqa: F401 # a fixture

SHARED = replace(TIGHT, tensor_parallel_size=2)


@pytest.fixture
def seed() -> int:
    return 7


@pytest.fixture(scope="session")
def qwen3(tiny_qwen3) -> Any:
    return load(tiny_qwen3)


@pytest.fixture(scope="session")
def shared(qwen3) -> Engine:
    return Engine(qwen3, SHARED)

"""One server of a fake engine for all tests that do it no harm, and OpenAI's own client."""

import inspect
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import transformers

from tests.llm.lora import ATTENTION, MLP, save_adapter
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import Live, fake_server

# The default of all of httpx's calls, five seconds otherwise: an answer that waits for a core is none that is missing.
_PATIENCE = inspect.signature(httpx.Client).parameters["timeout"].default
_PATIENCE.connect = _PATIENCE.read = _PATIENCE.write = _PATIENCE.pool = 60.0
with httpx.Client() as _client:
    assert _client.timeout.read == 60.0, "httpx keeps its default elsewhere by now: give each call a timeout"


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """A server whose answers are its prompts."""
    with fake_server(FakeEngine(max_length=1024, blocks=256), schema_bytes=2000, body_bytes=100_000) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_engine(tiny_qwen3, tmp_path_factory):
    """A model and its engine with two adapters, compiled once."""
    from tests.llm.server.real import make_engine

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    root, rng = tmp_path_factory.mktemp("adapters"), np.random.default_rng()
    wide = save_adapter(root / "wide", theirs, rng, rank=3, modules=ATTENTION + MLP)
    thin = save_adapter(root / "thin", theirs, rng, rank=1, modules=("v_proj", "down_proj"))
    return make_engine(tiny_qwen3, wide=wide, thin=thin)


@pytest.fixture(scope="session")
def client(live: Live) -> Iterator[openai.OpenAI]:
    """The official client."""
    with connected(live) as client:
        yield client


@pytest.fixture(scope="session")
def http(live: Live) -> Iterator[httpx.Client]:
    """A client that knows nothing of OpenAI."""
    with httpx.Client(base_url=live.url) as client:
        yield client


def connected(live: Live, key: str = "none", **settings) -> openai.OpenAI:
    """The official client, without its own attempts to try again."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, **settings)

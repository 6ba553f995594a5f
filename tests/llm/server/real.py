"""A server of the engine itself, with a tiny random model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.weights import LoadedModel, load
from tests.llm.server.live import Live, listening


def make_engine(folder: Path, **adapters: Path) -> tuple[LoadedModel, Engine]:
    """A pool of 24 blocks of 4 tokens for 8 sequences of up to 64: they cannot all grow; drafts are verified."""
    config = EngineConfig(
        max_sequences=8,
        kv_blocks=24,
        block_size=4,
        max_tokens_per_step=32,
        max_length=64,
        steps_per_dispatch=2,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1),
    )
    loaded = load(folder)
    return loaded, Engine(loaded, config, adapters=adapters)


@contextlib.contextmanager
def real_server(loaded: LoadedModel, engine: Engine, **limits: Any) -> Iterator[Live]:
    """Serve it."""
    served = ServedModel(("tiny",), loaded.tokenizer, engine.sizes.max_length, adapters=engine.adapters)
    settings = ServerLimits(**{"drain_seconds": 5.0, **limits})
    app = create_app(engine, served, concurrent=engine.sizes.rows, limits=settings, grammars=engine.grammars)
    with listening(app, engine) as live:
        yield live

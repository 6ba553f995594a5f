"""A server on a free port of this machine, in a thread of its own."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from fullstride.llm.server.app import create_app
from fullstride.llm.server.launch import background
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.request_manager import RequestManager
from fullstride.llm.server.served_model import ServedModel
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer


@dataclass
class Live:
    """A running server."""

    url: str
    app: FastAPI
    engine: Any

    @property
    def bridge(self) -> RequestManager:
        return self.app.state.server.bridge


def until(true: Any, seconds: float = 60.0) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextlib.contextmanager
def listening(app: FastAPI, engine: Any = None) -> Iterator[Live]:
    """Serve an app."""
    with background(app) as url:
        yield Live(url, app, engine)


@contextlib.contextmanager
def fake_server(
    engine: FakeEngine | None = None,
    *,
    api_keys: tuple[str, ...] = (),
    hosts: tuple[str, ...] = ("*",),
    grammars: Any = None,
    **limits: Any,
) -> Iterator[Live]:
    """Serve a fake engine; a server that stops drains for a second at most."""
    engine = engine or FakeEngine()
    app = create_app(
        engine,
        ServedModel(("fake", "alias/of-fake"), FakeTokenizer(), engine.max_length),
        concurrent=engine.max_sequences,
        limits=ServerLimits(**{"drain_seconds": 1.0, **limits}),
        api_keys=api_keys,
        hosts=hosts,
        grammars=grammars,
    )
    with listening(app, engine) as live:
        yield live

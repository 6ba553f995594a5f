"""Engines of tiny models, compiled once for all tests, and a way to run requests to their end."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.acceptance import StepTimes
from fullstride.llm.outputs import Delta
from fullstride.llm.weights import load

# Too few blocks for all rows, small chunks, and a token budget that mixes them: whatever can happen happens.
TIGHT = EngineConfig(max_sequences=4, max_tokens_per_step=32, block_size=4, kv_blocks=40, max_length=120)


@pytest.fixture(scope="session")
def qwen3(tiny_qwen3) -> Any:
    return load(tiny_qwen3)


@pytest.fixture(scope="session")
def shared(qwen3) -> Engine:
    return Engine(qwen3, TIGHT)


@pytest.fixture
def engine(shared) -> Iterator[Engine]:
    """The shared engine, with nothing to do and all of its blocks; afterwards the same must hold."""
    assert shared.dead is None
    forget(shared)
    yield shared
    while shared.busy:
        shared.step()
    assert shared.stats().free_blocks == shared.stats().blocks
    assert shared.stats().running == shared.stats().waiting == 0


class Costs(StepTimes):
    """Cost of verifying drafts, in decode steps, that is not measured."""

    def __init__(self, cost: float):
        super().__init__()
        self.cost = cost

    def ratio(self, rows: int) -> float:
        return self.cost


def forget(engine: Engine) -> None:
    """Empty the prefix cache: take all blocks for something else."""
    blocks = engine._scheduler.blocks
    blocks.release(blocks.take(blocks.free))


@dataclass
class Completion:
    """All deltas of one completion, put together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    prompt_logprobs: Any = None
    finish: str | None = None
    stop: Any = None
    error: str = ""
    cached: int = 0

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish, self.stop, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.cached = delta.cached_tokens


def finish(engine: Engine, found: dict | None = None) -> dict[tuple[str, int], Completion]:
    """Step until nothing is left to do."""
    found = {} if found is None else found
    for _ in range(3000):
        if not engine.busy:
            assert all(completion.finish for completion in found.values())
            return found
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    raise AssertionError("the engine never ends")


def run(engine: Engine, *requests: tuple[Any, Any]) -> list[Completion]:
    """All at once; the first completion of each."""
    for i, (prompt, params) in enumerate(requests):
        engine.add(str(i), prompt, params)
    found = finish(engine)
    return [found[str(i), 0] for i in range(len(requests))]

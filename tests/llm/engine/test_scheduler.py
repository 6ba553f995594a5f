"""The scheduler beside a device of dictionaries: whatever a token sees lies where its block tables say."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from fullstride.llm.engine.blocks import BlockManager
from fullstride.llm.engine.scheduler import Scheduler, StepPlan
from fullstride.llm.engine.sequence import Request, Sequence, StopTextBuffer
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.sampling_params import SamplingParams

SIZE = 4
WINDOWS = [(None,), (1,), (9,), (6, None), (None, 4, 4), (None, None, 5, 5, 5), (3, 11, None)]


class Device:
    """Keys of a token are the tokens up to it, and each next token follows from them."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.keys = scheduler, dict[tuple[int, int], Any]()
        self.tokens: dict[int, list[int]] = {}
        self.reads = 0

    def run(self, plan: StepPlan) -> dict[int, list[int]]:
        """Return the new tokens of each sequence."""
        found = {}
        for sequence in plan.admitted:
            self.tokens[id(sequence)] = list(sequence.tokens)
        for sequence in plan.decodes:
            own = self.tokens[id(sequence)]
            before = len(own)
            for _ in range(plan.steps):
                if len(own) < sequence.request.limit and len(own) - 1 < SIZE * sequence.num_blocks:
                    self._write(sequence, own, len(own) - 1, len(own))
                    own.append(_next(own))
            assert len(own) > before, "a row that does nothing"
            found[id(sequence)] = own[before:]
        for chunk in plan.chunks:
            own = self.tokens[id(chunk.sequence)]
            self._write(chunk.sequence, own, chunk.start, chunk.start + chunk.count)
            found[id(chunk.sequence)] = [_next(own)] if chunk.last else []
            own += found[id(chunk.sequence)]
        return found

    def _write(self, sequence: Sequence, tokens: list[int], start: int, end: int) -> None:
        for group, table in enumerate(sequence.tables):
            for place in range(start, end):
                block = table.blocks[place // SIZE]
                assert block, "a key that is written to scratch"
                self.keys[block, place % SIZE] = group, tuple(tokens[: place + 1])
        for group, table in enumerate(sequence.tables):
            for place in range(start, end):
                for seen in range(0 if table.window is None else max(0, place - table.window + 1), place + 1):
                    assert self.keys[table.blocks[seen // SIZE], seen % SIZE] == (group, tuple(tokens[: seen + 1]))
                    self.reads += 1


def _next(tokens: list[int]) -> int:
    return (3 * tokens[-1] + len(tokens)) % 7


def _sequence(name: str, prompt: list[int], limit: int) -> Sequence:
    request = Request(name, prompt, SamplingParams(), limit, ())
    return Sequence(request, 0, list(prompt), (0, 0), StopTextBuffer(None))


def _read(scheduler: Scheduler, plan: StepPlan, made: dict[int, list[int]]) -> None:
    chunks = {id(chunk.sequence): chunk for chunk in plan.chunks}
    for sequence in plan.sequences:
        sequence.steps_in_flight -= 1
        sequence.pending -= plan.steps if id(sequence) not in chunks or chunks[id(sequence)].last else 0
        if sequence.finish is not None:
            continue
        sequence.tokens += made[id(sequence)]
        if made[id(sequence)] and sequence.row is not None and not sequence.prefilling:
            scheduler.name(sequence, len(sequence.tokens) - 1)
            scheduler.forget(sequence, len(sequence.tokens) - 1)
        if len(sequence.tokens) >= sequence.request.limit:
            sequence.finish = "length"
            scheduler.leave(sequence)


@pytest.mark.parametrize("sequences", [1, 9])
@pytest.mark.parametrize("windows", WINDOWS)
def test_what_a_token_sees_is_there(windows, sequences, seed):
    """On blocks for the longest sequence alone, and for all that run and some that ended."""
    rng = np.random.default_rng(seed)
    sizes = CompiledShapes(4, (4,), 5, (3,), (40,), 11, 2, SIZE, 0, 80, "float32", "float32", windows)
    sizes = CompiledShapes(**vars(sizes) | {"blocks": sizes.needed(79) * sequences + int(rng.integers(0, 5))})
    assert sizes.holds >= 80
    scheduler = Scheduler(sizes, BlockManager(sizes.blocks))
    device, flights = Device(scheduler), deque[tuple[StepPlan, dict[int, list[int]]]]()
    beginnings = [rng.integers(0, 7, 60).tolist() for _ in range(3)]
    waiting = []
    for i in range(25):
        prompt = beginnings[i % 3][: int(rng.integers(1, 60))] + rng.integers(0, 7, int(rng.integers(0, 3))).tolist()
        waiting.append(_sequence(str(i), prompt, int(rng.integers(len(prompt) + 1, 81))))
    every = list(waiting)
    for _ in range(5000):
        if waiting and rng.random() < 0.3:
            scheduler.waiting.append(waiting.pop())
        if scheduler.running and rng.random() < 0.02:  # a client that goes away
            gone = scheduler.running[int(rng.integers(len(scheduler.running)))]
            gone.finish = "abort"
            scheduler.leave(gone)
        plan = scheduler.plan()
        if plan is not None:
            flights.append((plan, device.run(plan)))
        if flights and (plan is None or len(flights) >= 2):
            _read(scheduler, *flights.popleft())
        if not (waiting or flights or scheduler.running or scheduler.waiting):
            break
    assert all(sequence.finish for sequence in every), "some never end"
    assert sequences == 1 or sum(sequence.num_cached_tokens or 0 for sequence in every) > 40
    assert device.reads > 400
    assert scheduler.blocks.free == sizes.blocks

"""Transfers to the device: their contents, number and order."""

import jax
import numpy as np
import pytest

from fullstride.llm.engine import engine as module
from fullstride.llm.engine.scheduler import StepPlan
from tests.llm.engine.conftest import finish, forget, run
from tests.llm.engine.test_engine import greedy

PROMPTS = [list(range(5, 5 + count)) for count in (3, 20, 50)]


@pytest.fixture
def plans(engine, monkeypatch) -> list[StepPlan]:
    """Every plan from here on."""
    made, original = [], engine._scheduler.plan

    def plan() -> StepPlan | None:
        if (found := original()) is not None:
            made.append(found)
        return found

    monkeypatch.setattr(engine._scheduler, "plan", plan)
    return made


def test_a_step_takes_one_array_from_the_host(engine, monkeypatch):
    sent = []

    def watched(program):
        def call(*arguments):
            sent.append([leaf.nbytes for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, jax.Array)])
            return program(*arguments)

        return call

    compiled = {key: watched(program) for key, program in engine._runner.compiled.items()}
    monkeypatch.setattr(engine._runner, "compiled", compiled)
    steps = engine.stats().steps
    run(engine, *((ids, greedy(20)) for ids in PROMPTS))
    assert len(sent) == engine.stats().steps - steps > 5
    assert {len(arrays) for arrays in sent} == {1}
    assert max(size for (size,) in sent) < 4096
    # Penalties take one more, when their row is admitted.
    sent.clear()
    forget(engine)
    steps = engine.stats().steps
    run(engine, (PROMPTS[0], greedy(20, presence_penalty=1.0)))
    assert len(sent) == engine.stats().steps - steps + 1


def test_the_next_dispatch_goes_out_before_the_last_one_is_read(engine, monkeypatch):
    order = []
    for name, sign in (("dispatch", 1), ("collect", -1)):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original, sign=sign: order.append(sign) or original(*a))
    run(engine, (PROMPTS[0], greedy(40)))
    under_way = np.cumsum(order)
    assert under_way.tolist() == [1] + [2, 1] * (len(order) // 2 - 1) + [0]


def test_chunks_and_decode_rows_share_a_budget(engine, plans):
    engine.add("first", PROMPTS[0], greedy(30))
    for _ in range(3):
        engine.step()
    for i, ids in enumerate(PROMPTS[1:]):
        engine.add(str(i), ids[::-1], greedy(5))
    finish(engine)
    sizes = [len(plan.decodes) + sum(chunk.count for chunk in plan.chunks) for plan in plans]
    assert max(sizes) == engine.sizes.budget == 32
    mixed = [plan for plan in plans if plan.decodes and plan.chunks]
    assert len(mixed) >= 3
    # The longest prompt takes several steps, and what decodes goes on in each of them.
    assert sum(any(chunk.sequence.request.name == "1" for chunk in plan.chunks) for plan in mixed) >= 2


def test_a_burst_makes_several_steps_and_ends_where_the_device_finds_the_end(engine, plans):
    (whole,) = run(engine, (PROMPTS[0], greedy(21)))
    steps = engine.sizes.steps
    # The first token comes with the prompt.
    assert [plan.steps for plan in plans] == [1] + [steps] * (20 // steps)
    last = next(i for i in range(2, 21) if (i - 1) % steps and whole.tokens[i] not in whole.tokens[:i])
    seen = []
    read = engine._read

    def note():
        seen.append(np.asarray(engine._flights[0].out.sampled.token)[:, 0].tolist())
        read()

    engine._read = note
    try:
        (cut,) = run(engine, (PROMPTS[0], greedy(21, stop_token_ids=[whole.tokens[last]])))
    finally:
        del engine._read
    assert cut.tokens == whole.tokens[: last + 1]
    assert [token for tokens in seen for token in tokens if token >= 0] == cut.tokens

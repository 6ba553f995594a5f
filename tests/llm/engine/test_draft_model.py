"""A draft model in an engine of its own: answers stay, and one that agrees saves steps."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine
from fullstride.llm.engine.draft_model import check_vocabulary
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.sampling_params import SamplingParams
from tests.llm.engine.conftest import TIGHT, Costs, finish
from tests.llm.engine.test_engine import greedy, prompt
from tests.llm.engine.test_speculation import told


@pytest.fixture(scope="module")
def agreeing(qwen3, tiny_qwen3, compiled_soon) -> Engine:
    """An engine whose draft model is the model itself."""
    config: Any = {"model": str(tiny_qwen3), "num_speculative_tokens": 3}
    engine: Any = Engine(qwen3, replace(TIGHT, speculative_config=config))
    engine._speculator.times = Costs(0.0)
    return engine


def test_drafts_of_the_model_itself_are_accepted(engine, agreeing, seed):
    """Drawn ones, too, since both draw from the same noise."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, Any] = {"temperature": 1.1, "max_tokens": 30, "ignore_eos": True}
    asked = [greedy(30), SamplingParams(**drawn, seed=4, n=2), SamplingParams(**drawn, seed=5, top_k=9, top_p=0.9)]
    prompts, found = [prompt(rng, int(rng.integers(1, 40))) for _ in asked], []
    for each in (engine, agreeing):
        for i, (ids, params) in enumerate(zip(prompts, asked, strict=True)):
            each.add(str(i), ids, params)
        found.append({name: told(one) for name, one in finish(each).items()})
    assert found[0] == found[1]
    stats = agreeing.stats()
    assert stats.drafts > 20
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens


def test_a_draft_engine_that_failed_drafts_no_more(engine, agreeing):
    drafts = agreeing._speculator._proposer
    drafts._engine.dead = "it failed"
    before = agreeing.stats().drafts
    for each in (engine, agreeing):
        each.add("0", [5, 6, 7], greedy(20))
    assert finish(agreeing)["0", 0].tokens == finish(engine)["0", 0].tokens
    assert agreeing.stats().drafts == before
    drafts._engine.dead = None


@pytest.mark.parametrize("size", [344, 350])
def test_another_vocabulary_is_refused(qwen3, size):
    tokenizer = SimpleNamespace(backend=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    draft = SimpleNamespace(config=replace(qwen3.config, vocab_size=size), tokenizer=tokenizer)
    config = SpeculativeConfig("draft_model", model="small")
    with pytest.raises(ConfigError, match="model=small: its vocabulary has .*: expected a draft model of the same voc"):
        check_vocabulary(config, draft, qwen3)

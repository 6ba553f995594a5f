from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.cases.llm import speculation
from benchmarks.cases.llm.shared import LlmBench
from benchmarks.cases.llm.speculation import OneToken, Text
from benchmarks.cases.llm.work import RandomParameters
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.acceptance import StepTimes
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.measure.roofline import Ceilings

pytestmark = pytest.mark.usefixtures("compiled_soon")
MODEL = ModelConfig("qwen3", 203, 64, 96, 1, 4, 2, 16, 128, qk_norm=True, dtype="float32")


def bench(model: ModelConfig, folder: Any) -> LlmBench:
    loaded = SimpleNamespace(config=model, parameters=RandomParameters(model, "float32"), tokenizer=None)
    return LlmBench(loaded, "random", "cpu", "float32", "plain", folder)


def test_what_was_accepted_is_accepted_again(tmp_path, monkeypatch):
    """Places of an answer of 20 tokens, the first of which the prompt's step brings."""
    accepted = [-1, 3, 0, 0, 0, -1, 7, *[0] * 7, 2, 0, 0, -1, -1, -1]
    monkeypatch.setattr(speculation, "ANSWER", 20)
    monkeypatch.setattr(speculation, "REPEATS", 1)
    monkeypatch.setattr(speculation, "KINDS", {"repeating": 0.0})
    monkeypatch.setattr(speculation, "jax_ceilings", lambda *_: Ceilings(1e12, 1e11, "", 1, [], []))
    monkeypatch.setattr(speculation, "_recorded", lambda vocab: {"repeating": [Text([9, 10, 11], accepted)]})
    monkeypatch.setattr(StepTimes, "ratio", lambda *_: 0.0)
    plain, drafted = read_result(speculation.run(bench(MODEL, tmp_path)))["rows"]
    assert [row["name"] for row in (plain, drafted)] == ["repeating", "repeating, speculative"]
    extra = drafted["extra"]
    # Places 1 to 4, 5 alone, 6 to 13, 14 to 16, and three without a draft.
    assert (extra["drafts"], extra["draft_tokens"], extra["accepted_tokens"]) == (3, 7 + 7 + 5, 12)


def test_weights_of_one_token_need_a_head_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match="expected qwen3-8b, or a model with texts"):
        speculation.run(bench(replace(MODEL, tied=True), tmp_path))


def test_weights_of_one_token_are_the_models_but_for_a_column(seed):
    made = RandomParameters(MODEL, "float32")
    changed = OneToken(made)
    assert list(changed) == list(made)
    for name in made:
        own = changed[name]
        np.testing.assert_array_equal(own[..., 1:], made[name][..., 1:])
    assert changed["head"][:, 0].nonzero()[0].tolist() == [speculation.CHOSEN]


def test_acceptance_by_place_is_what_prompt_lookup_finds():
    asked = SpeculativeConfig(num_speculative_tokens=3)
    found = speculation._accepted(Text([1, 2, 3, 4, 5, 9, 1, 2], []), [3, 4, 8, 8, 8, 8, 8], asked)
    assert found == [-1, 1, 0, -1, -1, 2, 1]

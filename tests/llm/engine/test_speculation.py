"""Speculative decoding: whatever is drafted, and however much of it is right, the answers are those without drafts."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig, build
from fullstride.llm.engine.acceptance import HALF_LIFE, Acceptance, StepTimes
from fullstride.llm.engine.prompt_lookup import PromptLookup, repetition
from fullstride.llm.engine.runner import compiles
from fullstride.llm.engine.speculation import Speculator
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.sampling_params import SamplingParams, Structured
from fullstride.llm.weights import load
from tests.llm.engine.conftest import TIGHT, Completion, Costs, finish, forget, run
from tests.llm.engine.test_engine import greedy, logprobs_of, prompt, theirs  # noqa: F401, a fixture
from tests.llm.tiny import FAMILIES

DRAFTS = 3


class Oracle:
    """Drafts from answers that are known, each token of which is replaced by another with a probability."""

    free = False

    def __init__(self, rng: np.random.Generator, wrong: float):
        self.rng, self.wrong = rng, wrong
        self.answers: dict[tuple[str, int], list[int]] = {}

    def draft(self, sequences, counts) -> list[list[int]]:
        return [self._own(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _own(self, sequence, count: int) -> list[int]:
        answer = self.answers[sequence.request.name, sequence.index][sequence.num_output_tokens :]
        count = min(count, int(self.rng.integers(0, DRAFTS + 1)))
        return [int(self.rng.integers(3, 320)) if self.rng.random() < self.wrong else t for t in answer[:count]]


@pytest.fixture(scope="module", params=["conditions", pytest.param("fixed bursts", marks=pytest.mark.thorough)])
def drafting(request, qwen3, compiled_soon) -> Engine:
    """With the programs of a CPU, and with those of a GPU, which have no conditions."""
    kernels = plain(dynamic=True)._replace(static_burst=request.param == "fixed bursts")
    drafts: Any = {"num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose", lambda *_, **__: kernels)
        return Engine(qwen3, replace(TIGHT, speculative_config=drafts))


@pytest.fixture
def drafts(drafting, rng) -> Oracle:
    """The drafting engine's own drafts replaced by an oracle's, of which a third is wrong."""
    forget(drafting)
    oracle = Oracle(rng, 0.3)
    speculator = Speculator(oracle, drafting.sizes)
    speculator.times = Costs(0.0)
    drafting._speculator = drafting._scheduler.drafter = speculator
    return oracle


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def settings(rng: np.random.Generator) -> list[SamplingParams]:
    """Requests with all that they may ask for, each alone and some together."""
    sampled: dict[str, Any] = {"max_tokens": 21, "ignore_eos": True, "temperature": 1.3}
    return [
        greedy(25),
        greedy(17, logprobs=2),
        greedy(20, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4),
        SamplingParams(**sampled, seed=int(rng.integers(1 << 30)), n=2, logprobs=0),
        SamplingParams(**sampled, seed=5, top_k=20, top_p=0.8, min_p=0.01, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=6, max_tokens=30, min_tokens=9, logit_bias={2: 8.0, 40: -3.0}),
        SamplingParams(**sampled, seed=7, stop=["e", "he"], include_stop_str_in_output=True),
        SamplingParams(**sampled, seed=8, stop_token_ids=[*range(60, 75)]),
        SamplingParams(**sampled, seed=9, bad_words=["the", "a"]),
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=Structured("regex", "[a-c]{3,9}")),
    ]


def told(found: Completion) -> tuple:
    own = [(place[0].token, place[0].rank) for place in found.logprobs]
    return found.tokens, found.text, found.finish, found.stop, own


@pytest.mark.parametrize("together", [False, True])
def test_answers_are_those_without_drafts(engine, drafting, drafts, rng, together):
    asked = [(prompt(rng, int(rng.integers(15, 60))), params) for params in settings(rng)]
    for i, (ids, params) in enumerate(asked):
        engine.add(str(i), ids, params)
    plain = finish(engine)
    drafts.answers = {name: found.tokens for name, found in plain.items()}
    before, compiled, found = drafting.stats(), compiles(), {}
    for i, (ids, params) in enumerate(asked):
        drafting.add(str(i), ids, params)
        if not together:
            finish(drafting, found)
    finish(drafting, found)
    assert {name: told(each) for name, each in found.items()} == {name: told(each) for name, each in plain.items()}
    for name, each in found.items():
        values = [[value.logprob for value in place] for place in each.logprobs]
        for ours, wanted in zip(values, plain[name].logprobs, strict=True):
            np.testing.assert_allclose(ours, [value.logprob for value in wanted], atol=1e-3)
    stats = drafting.stats()
    assert compiles() == compiled
    assert 0 < stats.accepted_tokens < stats.draft_tokens <= DRAFTS * stats.drafts
    assert stats.steps - before.steps < stats.generated_tokens - before.generated_tokens
    assert stats.free_blocks == stats.blocks
    if together:
        assert stats.preemptions > before.preemptions


def test_drafts_that_are_right_save_steps(engine, drafting, drafts, rng):
    ids, drafts.wrong = prompt(rng, 9), 0.0
    (plain,) = run(engine, (ids, greedy(33)))
    drafts.answers = {("0", 0): plain.tokens}
    drafts.draft = lambda sequences, counts: [plain.tokens[sequences[0].num_output_tokens :][: counts[0]]]
    before = drafting.stats()
    assert run(drafting, (ids, greedy(33)))[0].tokens == plain.tokens
    stats = drafting.stats()
    # One step of the prompt, which brings a token, and of each draft, with the token that follows it.
    assert stats.steps - before.steps == 1 + 32 // (DRAFTS + 1)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (8, 24, 24)


def test_sampled_tokens_have_the_models_law(drafting, drafts, theirs):  # noqa: F811
    """Compare the third token's, by Pearson's statistic, with transformers'; drafts are two likely tokens."""
    ids, count, kept, temperature = [9, 80, 41, 7], 400, 4, 1.5
    law, second = defaultdict[int, float](float), defaultdict[int, float](float)
    for a, first in _kept(logprobs_of(theirs, ids)[-1], kept, temperature).items():
        for b, share in _kept(logprobs_of(theirs, [*ids, a])[-1], kept, temperature).items():
            second[b] += first * share
            for c, own in _kept(logprobs_of(theirs, [*ids, a, b])[-1], kept, temperature).items():
                law[c] += first * share * own
    likeliest = [max(each, key=each.__getitem__) for each in (second, law)]
    drafts.draft = lambda sequences, counts: [likeliest[:count] for count in counts]
    params = SamplingParams(n=count, temperature=temperature, top_k=kept, max_tokens=6, ignore_eos=True)
    drafting.add("0", ids, params)
    said = Counter(found.tokens[2] for found in finish(drafting).values())
    assert set(said) <= set(law)
    often = [token for token, share in law.items() if share * count >= 5]
    statistic = sum((said[token] - law[token] * count) ** 2 / (law[token] * count) for token in often)
    # Mean and variance of chi-square are k and 2 k: six deviations of it are the bound.
    assert statistic < len(often) + 6 * (2 * len(often)) ** 0.5
    stats = drafting.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def _kept(logprobs: np.ndarray, count: int, temperature: float) -> dict[int, float]:
    best = np.argsort(-logprobs)[:count]
    shares = np.exp((logprobs[best] - logprobs[best[0]]) / temperature)
    return dict(zip(best.tolist(), (shares / shares.sum()).tolist(), strict=True))


def test_a_text_that_repeats_is_drafted_and_one_that_does_not_is_not(drafting, engine, rng):
    """By prompt lookup and measured times, which a text that does not repeat leaves as they are."""
    forget(drafting)
    speculator = Speculator(PromptLookup(1, 4), drafting.sizes)
    drafting._speculator = drafting._scheduler.drafter = speculator
    speculator.times = Costs(1.7)
    ids = prompt(rng, 12)
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=80, ignore_eos=True)
    (wanted,) = run(engine, (ids, params))
    assert run(drafting, (ids, params))[0].tokens == wanted.tokens
    few = drafting.stats().drafts
    again = greedy(60, logit_bias={77: 1000.0})
    (wanted,) = run(engine, (ids, again))
    assert run(drafting, (ids, again))[0].tokens == wanted.tokens == [77] * 60
    stats = drafting.stats()
    assert few <= 8
    assert stats.drafts - few >= 10
    assert stats.accepted_tokens >= 0.8 * (stats.draft_tokens - DRAFTS * few)


@pytest.mark.parametrize("shortest", [1, 2])
def test_what_followed_the_newest_tokens_before(rng, shortest):
    """Against a search of every place."""
    for _ in range(200):
        tokens = rng.integers(0, 3, int(rng.integers(1, 20))).astype(np.int32)
        wanted, text = None, tokens.tolist()
        for n in range(shortest, 5):
            ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
            wanted = ends[-1] if ends else wanted
        assert repetition(tokens, shortest, 4) == wanted


def test_what_is_expected_of_a_draft_is_learned():
    known, rng = Acceptance(), np.random.default_rng(0)
    for _ in range(2000):
        drafted = 5 * bool(rng.random() < 0.6)
        matched = int(np.cumprod(rng.random(drafted) < 0.8).sum())
        known.observe(drafted, matched, matched + 1, 0.01)
    assert known.found == pytest.approx(0.6, abs=0.15)
    assert known.accepted == pytest.approx(0.8, abs=0.1)
    assert Acceptance(1.0, 0.5).tokens(3) == 1 + 0.5 + 0.25 + 0.125
    assert Acceptance().tokens(0) == 1


def test_the_cost_of_verifying_is_measured_and_forgotten():
    times = StepTimes()
    for seconds in (9.0, 0.2, 0.3):  # the first of a program sets it up
        times.verified(4, seconds)
        assert times.ratio(4) == 1
    for seconds in (9.0, 0.4, 0.8):
        times.decoded(4, seconds, 4)
    assert times.ratio(1) == 1
    # Twelve decode steps since.
    assert times.ratio(4) == pytest.approx(1 + (0.2 / 0.1 - 1) * 0.5 ** (12 / HALF_LIFE))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "medusa"}, "method"),
        ({"num_tokens": 3}, "num_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: expected an integer, 1 or more"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "expected a minimum that is not above the maximum"),
        ({"method": "ngram", "model": "smollm2"}, "a model is given for draft_model alone"),
        ({"method": "draft_model"}, "a model is given for draft_model alone"),
        ("ngram", "expected a dict"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=given)


def test_settings_by_vllms_names():
    given: Any = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    assert EngineConfig(speculative_config=given).speculative_config == SpeculativeConfig("ngram", 4, 3, 3)
    assert SpeculativeConfig.of({"model": "draft"}).method == "draft_model"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_answers_of_models_with_windows_stay(tiny_model, kind, rng):
    loaded = load(tiny_model(kind, **FAMILIES[kind]))
    tight: Any = replace(TIGHT, kv_blocks=60)
    asked = [(prompt(rng, int(rng.integers(5, 70))), greedy(40)) for _ in range(5)]
    plain = run(Engine(loaded, tight), *asked)
    drafts = {"num_speculative_tokens": 13, "prompt_lookup_min": 1}
    drafting: Any = Engine(loaded, replace(tight, speculative_config=drafts))
    oracle = Oracle(rng, 0.1)
    oracle.answers = {(str(i), 0): each.tokens for i, each in enumerate(plain)}
    drafting._speculator._proposer, drafting._speculator.times = oracle, Costs(0.0)
    assert [each.tokens for each in run(drafting, *asked)] == [each.tokens for each in plain]
    assert drafting.stats().accepted_tokens > 20

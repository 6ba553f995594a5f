import dataclasses

import numpy as np
import pytest
import torch
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.engine import collect as reading
from fullstride.llm.engine.blocks import digest, salted
from fullstride.llm.engine.runner import compiles
from fullstride.llm.sampling_params import SamplingParams, Structured
from fullstride.llm.text.tokenizer import Detokenizer, Tokenizer
from tests.llm.engine.conftest import Completion, finish, run


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def prompt(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, 320, count).tolist()


def text_of(engine, ids: list[int], said: list[int]) -> str:
    """Return the text of a completion; its prompt may end within a character."""
    text = Detokenizer(engine.tokenizer, after=ids)
    return text.push(said) + text.flush()


@pytest.fixture(scope="module")
def theirs(tiny_qwen3):
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3).eval()


def logprobs_of(model, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


def continued(model, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, without its cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logprobs_of(model, ids)[-1].argmax()))
    return ids[-count:]


def test_blocks_are_shared_within_a_salt_alone(engine, rng):
    ids, found = prompt(rng, 22), []
    # The bytes of a salt may be those of a block.
    salts = ("", "a", "", "b", "a", np.asarray(ids[:4], np.int32).tobytes().decode("latin-1"))
    for salt in salts:
        engine.add("0", ids, greedy(3), cache_salt=salt)
        found.append(finish(engine)["0", 0])
    assert [each.cached for each in found] == [0, 0, 20, 0, 20, 0]
    assert len({tuple(each.tokens) for each in found}) == 1
    names = [engine.block_hashes(ids, None, salt)[0] for salt in salts]
    assert len(set(names)) == 4
    block = [token % 128 for token in ids[:4]]
    assert salted(b"", np.asarray(block, np.int32).tobytes().decode()) != digest(b"", block)


def test_greedy_tokens_are_those_of_transformers(engine, theirs, rng):
    prompts = [prompt(rng, count) for count in (1, 7, 32, 33, 70)]
    found = run(engine, *((ids, greedy(12)) for ids in prompts))
    for ids, completion in zip(prompts, found, strict=True):
        assert completion.tokens == continued(theirs, ids, 12)
        assert completion.finish == "length"


def test_logprobs_are_those_of_transformers(engine, theirs, rng):
    ids = prompt(rng, 45)
    (found,) = run(engine, (ids, greedy(5, logprobs=3, prompt_logprobs=2)))
    expected = logprobs_of(theirs, ids + found.tokens)
    assert found.prompt_logprobs[0] is None
    told = [*found.prompt_logprobs[1:], *found.logprobs]
    for place, (values, token) in enumerate(zip(told, (ids + found.tokens)[1:], strict=True)):
        row, own = expected[place], values[0]
        assert own.token == token
        assert own.logprob == pytest.approx(row[token], abs=1e-3)
        assert own.rank == 1 + (row > row[token]).sum()
        best = values[1:]
        assert len(best) == (3 if place >= 44 else 2)
        assert [value.token for value in best] == np.argsort(-row)[: len(best)].tolist()
        np.testing.assert_allclose([value.logprob for value in best], np.sort(row)[::-1][: len(best)], atol=1e-3)


def test_prompt_logprobs_come_even_where_the_prompt_is_cached(engine, rng):
    ids = prompt(rng, 40)
    params = greedy(2, prompt_logprobs=0)
    first, second = run(engine, (ids, params))[0], run(engine, (ids, params))[0]
    assert len(first.prompt_logprobs) == 40
    assert second.cached == 0
    for a, b in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert a[0].logprob == pytest.approx(b[0].logprob, abs=1e-4)


def test_a_cached_prompt_still_computes_its_last_token(engine, theirs, rng):
    for count in (15, 16, 17):
        ids = prompt(rng, count)
        first, again = run(engine, (ids, greedy(6)))[0], run(engine, (ids, greedy(6)))[0]
        assert first.tokens == again.tokens == continued(theirs, ids, 6)
        assert first.cached == 0
        assert again.cached == (count - 1) // 4 * 4


def test_what_a_request_said_is_cached_too(engine, rng):
    ids = prompt(rng, 10)
    said = run(engine, (ids, greedy(11)))[0].tokens
    # Of the last token there is no key.
    assert run(engine, (ids + said + [5], greedy(1)))[0].cached == 20


@pytest.mark.parametrize("trial", range(4))
def test_the_same_tokens_however_a_request_is_run(engine, rng, trial):
    """Alone, batched, chunked, preempted, cached: in a random order of arrivals."""
    shared = prompt(rng, 21)
    prompts = [(shared if rng.random() < 0.4 else []) + prompt(rng, int(rng.integers(1, 60))) for _ in range(9)]
    lengths = rng.integers(1, 36, 9).tolist()
    alone = [run(engine, (ids, greedy(n)))[0].tokens for ids, n in zip(prompts, lengths, strict=True)]
    before, found = engine.stats().preemptions, {}
    for i in rng.permutation(9).tolist():
        engine.add(str(i), prompts[i], greedy(lengths[i]))
        for _ in range(int(rng.integers(0, 4))):
            for delta in engine.step():
                found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    finish(engine, found)
    assert [found[str(i), 0].tokens for i in range(9)] == alone
    if trial == 3:
        assert engine.stats().preemptions > 0
    assert engine.stats().preemptions >= before


def test_next_to_no_temperature_is_none(engine, rng):
    prompt = rng.integers(3, 320, 9).tolist()
    (wanted,) = run(engine, (prompt, greedy(12)))
    for cold in (1e-38, 1e-6):
        params = SamplingParams(temperature=cold, max_tokens=12, ignore_eos=True)
        assert run(engine, (prompt, params))[0].tokens == wanted.tokens


@pytest.mark.parametrize("top_p", [1e-30, 1e-40, 2.3e-308, 5e-324])
def test_next_to_no_top_p_leaves_the_most_probable_token(engine, rng, top_p):
    ids, small = prompt(rng, 9), SamplingParams(top_p=top_p, max_tokens=8, ignore_eos=True)
    expected, found = run(engine, (ids, greedy(8)), (ids, small))
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("min_p", [1e-30, 1e-40, 5e-324])
def test_next_to_no_min_p_leaves_nothing_out(engine, rng, min_p):
    ids, plain = prompt(rng, 9), SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
    expected, found = run(engine, (ids, plain), (ids, dataclasses.replace(plain, min_p=min_p)))
    assert found.tokens == expected.tokens


def test_a_seed_gives_the_same_tokens_in_any_company(engine, rng):
    ids, params = prompt(rng, 9), SamplingParams(temperature=1.0, top_p=0.95, max_tokens=20, seed=7, ignore_eos=True)
    alone = run(engine, (ids, params))[0]
    others = [(prompt(rng, 20), SamplingParams(max_tokens=30, ignore_eos=True)) for _ in range(5)]
    assert run(engine, *others[:3], (ids, params), *others[3:])[3].tokens == alone.tokens
    assert run(engine, (ids, dataclasses.replace(params, seed=8)))[0].tokens != alone.tokens
    unseeded = dataclasses.replace(params, seed=None)
    assert run(engine, (ids, unseeded))[0].tokens != run(engine, (ids, unseeded))[0].tokens


def test_n_completions_share_the_prompt_and_differ(engine, rng):
    ids, before = prompt(rng, 24), engine.stats().prefix_hits
    engine.add(
        "a", ids, SamplingParams(n=6, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    )
    found = finish(engine)
    assert sorted(found) == [("a", i) for i in range(6)]
    assert len({tuple(completion.tokens) for completion in found.values()}) == 6
    # Nobody was spared what the first one computed.
    assert [found["a", i].cached for i in range(6)] == [0] * 6
    assert engine.stats().prefix_hits - before == 5 * 20
    assert [found["a", i].prompt_logprobs is None for i in range(6)] == [False] + [True] * 5


def test_it_ends_at_a_stop_token(engine, rng):
    ids = prompt(rng, 8)
    tokens = run(engine, (ids, greedy(20)))[0].tokens
    end = tokens[9]
    (found,) = run(engine, (ids, greedy(20, stop_token_ids=[end])))
    assert found.tokens == tokens[: tokens.index(end) + 1]
    assert (found.finish, found.stop) == ("stop", end)
    assert found.text == text_of(engine, ids, found.tokens[:-1])
    (kept,) = run(engine, (ids, greedy(20, stop_token_ids=[end], stop=["\0"], include_stop_str_in_output=True)))
    assert (kept.tokens, kept.text) == (found.tokens, text_of(engine, ids, found.tokens))


def test_the_end_token_ends_it_unless_ignored_and_not_before_min_tokens(engine, rng):
    ids, eos = prompt(rng, 8), engine.model.eos[0]
    certain = {"temperature": 0.0, "logit_bias": {eos: 1000.0}, "max_tokens": 9}
    ends, goes_on, late = run(
        engine,
        (ids, SamplingParams(**certain)),
        (ids, SamplingParams(**certain, ignore_eos=True)),
        (ids, SamplingParams(**certain, min_tokens=4)),
    )
    assert (ends.tokens, ends.finish, ends.stop, ends.text) == ([eos], "stop", None, "")
    assert (goes_on.tokens, goes_on.finish) == ([eos] * 9, "length")
    assert len(late.tokens) == 5
    assert late.tokens.index(eos) == 4


def test_penalties_count_prompt_and_output(engine, rng):
    ids = prompt(rng, 30)
    plain = run(engine, (ids, greedy(20)))[0].tokens
    never, once = run(engine, (ids, greedy(20, repetition_penalty=1e9)), (ids, greedy(20, frequency_penalty=1e9)))
    assert not set(never.tokens) & set(ids)
    assert len(set(never.tokens)) == len(set(once.tokens)) == 20
    assert len(set(plain)) < 20 or set(plain) & set(ids)


def test_penalties_survive_preemption(engine, rng):
    requests = [(prompt(rng, 30), greedy(30, presence_penalty=3.0, repetition_penalty=1.5)) for _ in range(4)]
    alone = [run(engine, request)[0].tokens for request in requests]
    before = engine.stats().preemptions
    assert [completion.tokens for completion in run(engine, *requests)] == alone
    assert engine.stats().preemptions > before


def test_text_is_that_of_the_tokens_and_ends_before_a_stop_text(engine, rng):
    ids = prompt(rng, 12)
    (whole,) = run(engine, (ids, greedy(40)))
    assert whole.text == text_of(engine, ids, whole.tokens)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    cut, kept = run(
        engine, (ids, greedy(40, stop=[stop])), (ids, greedy(40, stop=stop, include_stop_str_in_output=True))
    )
    expected = whole.text[: whole.text.index(stop)]
    assert (cut.text, cut.finish, cut.stop) == (expected, "stop", stop)
    assert kept.text == expected + stop
    assert len(cut.tokens) < 40


def test_structured_output_keeps_to_its_grammar(engine, rng):
    shape = Structured("regex", "[0-9]{3}-(yes|no)")
    params = SamplingParams(temperature=1.0, max_tokens=40, structured_outputs=shape, seed=3, n=2)
    engine.add("a", prompt(rng, 40), params)
    engine.add("b", prompt(rng, 5), greedy(30))
    found = finish(engine)
    for i in range(2):
        text, finish_reason = found["a", i].text, found["a", i].finish
        assert finish_reason == "stop"
        assert text[3:] in ("-yes", "-no")
        assert text[:3].isdigit()
    assert len(found["b", 0].tokens) == 30


def test_a_complete_shape_ends_before_min_tokens(engine, rng):
    shape = Structured("regex", "(yes|no)")
    params = SamplingParams(structured_outputs=shape, min_tokens=12, max_tokens=20, stop_token_ids=[5])
    (found,) = run(engine, (prompt(rng, 8), params))
    assert (found.finish, found.tokens[-1], found.error) == ("stop", engine.model.eos[0], "")
    assert found.text in ("yes", "no")


def test_abort_frees_blocks_at_once_and_says_so(engine, rng):
    for name in ("a", "b", "c", "d", "e"):
        engine.add(name, prompt(rng, 20), greedy(60, n=2 if name == "b" else 1))
    found = {}
    for _ in range(3):
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    engine.abort("b")
    engine.abort("e")
    engine.abort("nobody")
    for delta in engine.step():
        found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    assert [found[key].finish for key in (("b", 0), ("b", 1), ("e", 0))] == ["abort"] * 3
    finish(engine, found)
    assert len(found["a", 0].tokens) == 60
    assert len(found["b", 0].tokens) < 60


def test_nothing_is_compiled_once_it_runs(engine, rng):
    before = compiles()
    engine.add("n", prompt(rng, 50), SamplingParams(n=3, max_tokens=20, temperature=0.7, top_k=5, min_p=0.1))
    engine.add("l", prompt(rng, 3), SamplingParams(logprobs=4, prompt_logprobs=3, logit_bias={5: 2.0}))
    engine.add("g", prompt(rng, 3), SamplingParams(structured_outputs=Structured("regex", "[ab]{4}")))
    engine.add("p", prompt(rng, 70), greedy(25, repetition_penalty=1.2))
    engine.step()
    engine.abort("n")
    finish(engine)
    assert compiles() == before > 0


def test_a_step_that_fails_ends_its_own_requests_alone(engine, rng, monkeypatch):
    ids = [prompt(rng, 20) for _ in range(6)]
    alone = [run(engine, (tokens, greedy(25)))[0].tokens for tokens in ids]
    for i, tokens in enumerate(ids):
        engine.add(str(i), tokens, greedy(25))
    found = {}
    for _ in range(4):
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    running = {sequence.request.name for sequence in engine._scheduler.running}
    assert 0 < len(running) < 6

    def broken(*_, **__):
        raise RuntimeError("out of\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", broken)
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    finish(engine, found)
    for i, expected in enumerate(alone):
        completion = found[str(i), 0]
        if completion.finish == "error":
            assert completion.error == "out of memory"
        else:
            assert completion.tokens == expected
    assert {found[name, 0].finish for name in running} == {"error"}
    assert "length" in {completion.finish for completion in found.values()}


def test_what_was_read_before_reading_failed_is_not_lost(engine, rng, monkeypatch):
    """The first ends in a step of which the second one's tokens cannot be read."""
    ids = prompt(rng, 5)
    (alone,) = run(engine, (ids, greedy(10)))
    take, ended = reading._take, []

    def broken(draft, *rest):
        if ended:
            raise RuntimeError("no such character")
        take(draft, *rest)
        ended.extend([draft.sequence.request.name] if draft.sequence.finish else [])

    engine.add("a", ids, greedy(10))
    engine.add("b", prompt(rng, 5), greedy(40))
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_take", broken)
        found = finish(engine)
    assert (found["a", 0].tokens, found["a", 0].finish) == (alone.tokens, "length")
    assert (found["b", 0].finish, found["b", 0].error) == ("error", "no such character")


def test_without_a_new_pool_the_engine_is_dead_and_says_so(engine, rng, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("lost device")

    engine.add("a", prompt(rng, 20), greedy(25))
    engine.add("b", prompt(rng, 20), greedy(25))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", broken)
        patch.setattr(engine._runner, "reset", broken)
        found = finish(engine)
    assert {completion.finish for completion in found.values()} == {"error"}
    assert engine.dead == "lost device"
    # Requests get a line; the log has where it happened.
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert engine.step() == []
    with pytest.raises(ConfigError, match="the engine has failed: lost device"):
        engine.add("c", [5], greedy(1))
    engine.dead = None
    engine._restart()


def test_a_grammar_that_fails_harms_no_other(engine, rng):
    engine.add("g", prompt(rng, 5), SamplingParams(max_tokens=30, structured_outputs=Structured("regex", "a{30}")))
    engine.add("o", prompt(rng, 5), greedy(30))
    engine._live["g"][0].matcher.advance = lambda token: 1 / 0
    found = finish(engine)
    assert (found["g", 0].finish, found["g", 0].error) == ("error", "division by zero")
    assert len(found["o", 0].tokens) == 30


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 344], {}, "prompt has the token id 344: .* 0 to 343"),
        ([-1], {}, "token id -1"),
        ([5] * 120, {}, "the prompt has 120 tokens: expected at most 119"),
        ([5] * 100, {"max_tokens": 21}, "max_tokens=21 are 121: expected at most 120"),
        ([5] * 100, {"max_tokens": None, "min_tokens": 21}, "min_tokens=21: after a prompt of 100 tokens"),
        ([5], {"max_tokens": None, "min_tokens": 2**31 - 1}, "request at most that many"),
        ([5], {"logit_bias": {400: 1.0}}, "logit_bias has the token id 400"),
        ([5], {"stop_token_ids": list(range(17))}, "at most 16"),
        ([5], {"logprobs": 21}, "logprobs needs 21: expected at most 20"),
        ([5], {"structured_outputs": Structured("regex", "(")}, "regex"),
    ],
)
def test_what_can_never_run_is_refused(engine, ids, params, message):
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        engine.add("x", ids, SamplingParams(**params))
    assert not engine.busy


def test_a_name_is_used_once_at_a_time(engine):
    engine.add("x", [5], greedy(2))
    with pytest.raises(ConfigError, match="request_id=x: .*is running"):
        engine.add("x", [5], greedy(2))
    finish(engine)
    engine.add("x", [5], greedy(2))
    finish(engine)


def test_max_tokens_none_goes_to_the_models_length(engine, rng):
    (found,) = run(engine, (prompt(rng, 100), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)))
    assert len(found.tokens) == engine.sizes.max_length - 100 == 20


def test_the_tokenizer_is_the_models(engine):
    assert isinstance(engine.tokenizer, Tokenizer)

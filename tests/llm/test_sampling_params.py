import math
import random

import pytest

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import SamplingParams, Structured


def test_one_stop_text_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=None).stop is None


@pytest.mark.parametrize("once", [iter, lambda given: (each for each in given)], ids=["iterator", "generator"])
def test_stops_that_can_be_gone_through_once_are_kept(once, seed):
    draw = random.Random(seed)
    texts, ids = [f"END{draw.random()}", "\n"], [draw.randrange(1000) for _ in range(3)]
    params = SamplingParams(stop=once(texts), stop_token_ids=once(ids))
    assert (params.stop, params.stop_token_ids) == (tuple(texts), tuple(ids))
    for wrong in ({"stop": once(["a", ""])}, {"stop_token_ids": once([5, "6"])}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*: expected"):
            SamplingParams(**wrong)


def test_a_seed_of_minus_one_is_none_and_no_other_is():
    assert SamplingParams(seed=-1) == SamplingParams()
    assert [SamplingParams(seed=seed).seed for seed in (-2, 0, 1, None)] == [-2, 0, 1, None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -2},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e300},
        {"presence_penalty": math.inf},
        {"presence_penalty": 1e300},
        {"frequency_penalty": math.nan},
        {"logit_bias": {3: math.inf}},
        {"stop": ["a", ""]},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
    ],
    ids=str,
)
def test_what_no_sampler_can_do_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*: expected"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("top_k", 2.5, "an integer"),
        ("n", True, "an integer"),
        ("seed", "one", "an integer"),
        ("temperature", "0.7", "a number"),
        ("top_p", None, "a number"),
        ("stop_token_ids", [5.5], "token ids, which are integers"),
        ("stop_token_ids", 5, "a list, or None"),
        ("stop", 5, "a list, or None"),
        ("logit_bias", [5], "a dict, or None"),
        ("logit_bias", {"5": 1.0}, "token ids, which are integers"),
        ("logit_bias", {5: "1"}, "numbers by token id"),
        ("structured_outputs", {"type": "object"}, r"Structured\(kind, value\)"),
    ],
)
def test_what_the_device_would_cut_is_refused(name, value, kind):
    params = SamplingParams()
    object.__setattr__(params, name, value)  # past the annotations, which users' programs do not check
    with pytest.raises(ConfigError, match=f"{name}=.*: expected {kind}"):
        params.__post_init__()


def test_shapes_are_texts_of_a_known_kind():
    shape = Structured("json_schema", "{}")
    for kind, value, message in (
        ("json", "{}", "structured output=json: expected one of"),
        ("json_schema", {"type": "object"}, "json_schema is dict: expected a text; use json.dumps"),
    ):
        object.__setattr__(shape, "kind", kind)
        object.__setattr__(shape, "value", value)
        with pytest.raises(ConfigError, match=message):
            shape.__post_init__()


def test_what_may_be_none_may():
    params = SamplingParams(seed=None, max_tokens=None, logprobs=None, prompt_logprobs=None)
    assert params.max_tokens is None

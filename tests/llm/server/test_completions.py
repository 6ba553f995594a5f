import json

import pytest

from tests.llm.server.fake_tokenizer import END, START

TEXT = "Grüße an 東京 👩‍🚀!"


def test_a_text(client, live):
    done = client.completions.create(model="fake", prompt=TEXT, max_tokens=100)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    bytes_ = len(TEXT.encode())
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1 + bytes_, bytes_ + 1)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == (1 + bytes_) // 2
    assert live.engine.prompts[-1] == [START, *TEXT.encode()]
    assert (done.object, done.model) == ("text_completion", "fake")


def test_sixteen_tokens_unless_said_otherwise(client):
    done = client.completions.create(model="fake", prompt="a" * 40)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("a" * 16, "length")


def test_token_ids(client, live):
    done = client.completions.create(model="fake", prompt=[START, 104, 105])
    assert done.choices[0].text == "hi"
    assert live.engine.prompts[-1] == [START, 104, 105]


@pytest.mark.parametrize("prompt", [["ab", "cd", "ef"], [[97, 98], [99, 100], [101, 102]]])
def test_several_prompts_each_several_times(client, prompt):
    done = client.completions.create(model="fake", prompt=prompt, n=2)
    assert [choice.index for choice in done.choices] == list(range(6))
    assert [choice.text for choice in done.choices] == ["ab", "ab", "cd", "cd", "ef", "ef"]
    assert done.usage.completion_tokens == 6 * 3


def test_a_stream_says_what_the_whole_says(client):
    asked = {"model": "fake", "prompt": [TEXT, "second"], "max_tokens": 60, "n": 2, "logprobs": 2, "echo": True}
    whole = client.completions.create(**asked)
    texts, offsets, reasons = {}, {}, {}
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
        reasons.setdefault(choice.index, []).append(choice.finish_reason)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert [texts[i] for i in range(4)] == [choice.text for choice in whole.choices]
    assert [offsets[i] for i in range(4)] == [choice.logprobs.text_offset for choice in whole.choices]
    assert all(all_[-1] == "stop" and set(all_[:-1]) == {None} for all_ in reasons.values())
    assert len({chunk.id for chunk in chunks}) == 1


def test_no_event_has_half_a_character(client):
    pieces = [chunk.choices[0].text for chunk in client.completions.create(model="fake", prompt=TEXT, stream=True)]
    assert "�" not in "".join(pieces)
    assert all(pieces[:-1])


def test_logprobs_of_prompt_and_completion(client):
    done = client.completions.create(model="fake", prompt="aé", logprobs=2, echo=True, max_tokens=2)
    found = done.choices[0].logprobs
    assert done.choices[0].text == "aéa"
    assert found.tokens == ["<start>", "a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert found.text_offset == [0, 0, 1, 1, 2, 3]
    assert found.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert found.top_logprobs[0] is None
    assert found.top_logprobs[1] == {"a": -0.5, "b": -1.5}


def test_logprobs_without_the_prompt(client):
    found = client.completions.create(model="fake", prompt="abc", logprobs=1).choices[0].logprobs
    assert (found.tokens, found.text_offset) == (["a", "b", "c", "<end>"], [0, 1, 2, 3])


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_probabilities_alone(client, stream):
    asked = {"model": "fake", "prompt": [97, 98, 99], "echo": True, "max_tokens": 0, "logprobs": 0}
    done = client.completions.create(**asked, stream=stream)
    answers = list(done) if stream else [done]
    (choice,) = (choice for each in answers for choice in each.choices)
    assert stream or done.usage.completion_tokens == 0
    assert (choice.text, choice.logprobs.tokens) == ("abc", ["a", "b", "c"])
    assert choice.logprobs.top_logprobs == [None, {"b": -0.5}, {"c": -0.5}]


def test_the_prompt_alone_ends_by_its_length(client):
    asked = {"model": "fake", "prompt": "ab", "echo": True, "max_tokens": 0, "stop": ["a"]}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "length", None)


def test_the_end_by_a_stop_text_or_token(client):
    done = client.completions.create(model="fake", prompt="one, two", stop=[";", ","])
    choice = done.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one", "stop", ",")
    done = client.completions.create(model="fake", prompt="one, two", extra_body={"stop_token_ids": [ord("w")]})
    assert (done.choices[0].text, done.choices[0].stop_reason) == ("one, t", ord("w"))


def test_every_parameter_reaches_the_engine(client, live):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
    }
    client.completions.create(
        model="fake",
        prompt="x",
        max_tokens=3,
        temperature=0.3,
        top_p=0.9,
        presence_penalty=0.4,
        frequency_penalty=-0.4,
        logit_bias={"9": -100, "10": 2},
        seed=-3,
        stop="!",
        user="me",
        extra_body=extra,
    )
    params = live.engine.params[-1]
    reached = {**extra, "stop_token_ids": (7,), "stop": ("!",), "seed": -3, "temperature": 0.3, "top_p": 0.9}
    for name, value in {**reached, "max_tokens": 3}.items():
        assert getattr(params, name) == value
    assert params.logit_bias == {9: -100.0, 10: 2.0}
    assert (params.presence_penalty, params.frequency_penalty) == (0.4, -0.4)
    client.completions.create(model="fake", prompt="x", seed=-1)
    assert live.engine.params[-1].seed is None


def test_what_asks_for_nothing_is_taken(http):
    neutral = {"best_of": 1, "suffix": None, "n": None, "temperature": None, "stop": None, "logprobs": None}
    neutral |= {"skip_special_tokens": True, "length_penalty": 1.0, "priority": 0, "bad_words": [], "echo": False}
    answer = http.post("/v1/completions", json={"prompt": "a", "model": None, **neutral})
    assert answer.json()["choices"][0]["text"] == "a"


def test_the_marks_of_a_prompt_of_ids_are_repeated(client):
    done = client.completions.create(model="fake", prompt=[START, 97, END], echo=True, logprobs=0, max_tokens=1)
    assert done.choices[0].text == "<start>a<end>a"
    assert done.choices[0].logprobs.text_offset == [0, 7, 8, 13]


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_repeated_as_they_were_given(client, stream):
    """Without the first token that the tokenizer puts before them."""
    asked = {"model": "fake", "prompt": ["ab", "cd"], "echo": True, "max_tokens": 1}
    done = client.completions.create(**asked, stream=stream)
    texts = ["", ""]
    for choice in (choice for each in (done if stream else [done]) for choice in each.choices):
        texts[choice.index] += choice.text
    assert texts == ["aba", "cdc"]


def test_an_event_is_one_line_to_every_client(http):
    """Line separators that JSON does not escape, but at which Python's `splitlines` breaks, stay in one event."""
    text = "a\u2028b\u2029c\x85d"
    with http.stream("POST", "/v1/completions", json={"prompt": text, "stream": True, "max_tokens": 99}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_no_tokens_may_be_asked_for(client):
    done = client.completions.create(model="fake", prompt=["ab", "cde"], max_tokens=0, logprobs=1)
    assert [(choice.text, choice.finish_reason, choice.logprobs.tokens) for choice in done.choices] == [
        ("", "length", [])
    ] * 2
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 0)
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=0, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ""
    assert chunks[-1].choices[0].finish_reason == "length"

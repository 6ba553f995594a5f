"""vLLM's extensions that change a prompt or show its tokens; the fake model repeats its prompt."""

from typing import Any

import httpx
import openai
import pytest

from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.logprobs import token_text
from fullstride.llm.server.messages import chat_prompt
from fullstride.llm.server.schemas.chat import ChatRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.tokenizer import Tokenizer
from tests.llm.server.conftest import connected
from tests.llm.server.real import real_server
from tests.llm.tiny import make_tokenizer

HELLO: Any = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
EFFORT = "({{ reasoning_effort }})"


def _prompt(template: str, **asked: Any) -> str:
    served = ServedModel(("x",), Tokenizer(make_tokenizer(), eos=(2,), template=ChatTemplate(template, {})), 64)
    return chat_prompt(ChatRequest.model_validate({"messages": HELLO, **asked}), served, ServerLimits(), [])


def test_the_last_tokens_of_a_prompt_are_kept(client, live):
    for keep, kept in ((3, b"llo"), (99, b"hello"), (-1, b"hello")):
        extra = {"truncate_prompt_tokens": keep, "add_special_tokens": False}
        done = client.completions.create(model="fake", prompt=["hello", "ello"], extra_body=extra, echo=True)
        assert [bytes(prompt) for prompt in live.engine.prompts[-2:]] == [kept, kept[-4:]]
        assert [choice.text.encode() for choice in done.choices] == [2 * kept, 2 * kept[-4:]]
        assert done.usage.prompt_tokens == len(kept) + len(kept[-4:])
    client.chat.completions.create(model="fake", messages=HELLO, extra_body={"truncate_prompt_tokens": 4})
    assert bytes(live.engine.prompts[-1]) == b"nt: "
    long, most = "x" * 2000, live.engine.max_length
    extra = {"truncate_prompt_tokens": -1}
    client.completions.create(model="fake", prompt=long, max_tokens=9, extra_body=extra)
    assert bytes(live.engine.prompts[-1]) == b"x" * (most - 9)
    with pytest.raises(openai.BadRequestError, match="'prompt' has no tokens"):
        client.completions.create(model="fake", prompt="x", extra_body={"truncate_prompt_tokens": 0})


@pytest.mark.parametrize("stop", [None, "l"])
def test_token_ids_of_prompts_and_completions(client, live, stop):
    extra, end = {"return_token_ids": True}, live.app.state.server.served.tokenizer.eos[0]
    asked: dict[str, Any] = {"model": "fake", "n": 2, "stop": stop, "extra_body": extra}
    for prompt, made in (([*b"hello"], [*b"hello", end] if stop is None else [*b"hel"]), ([*"é".encode()], None)):
        made = made or [*prompt, end]
        whole = client.completions.create(prompt=prompt, **asked)
        assert [choice.prompt_token_ids for choice in whole.choices] == [prompt] * 2
        assert [choice.token_ids for choice in whole.choices] == [made] * 2
        events = [event.choices[0] for event in client.completions.create(prompt=prompt, stream=True, **asked)]
        assert [token for event in events if event.index == 1 for token in event.token_ids] == made
        assert [event.prompt_token_ids for event in events if event.prompt_token_ids] == [prompt] * 2
    whole = client.chat.completions.create(messages=HELLO, **asked)
    text = whole.choices[1].message.content
    assert bytes(whole.prompt_token_ids).startswith(b"user: hello\n")
    assert bytes(token for token in whole.choices[1].token_ids if token < 256).decode().startswith(text)
    events = list(client.chat.completions.create(messages=HELLO, stream=True, **asked))
    assert events[0].prompt_token_ids == whole.prompt_token_ids
    assert not any("prompt_token_ids" in event.model_extra for event in events[1:])
    second = [event.choices[0] for event in events if event.choices[0].index == 1]
    found = [token for each in second for token in each.model_extra.get("token_ids", ())]
    assert found == whole.choices[1].token_ids
    (plain,) = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=0).choices
    assert "token_ids" not in plain.model_extra


def test_a_final_message_is_continued():
    talk = [*HELLO, {"role": "assistant", "content": " so far, "}]
    asked = {"messages": talk, "add_generation_prompt": False}
    assert _prompt(TEMPLATE, **asked, continue_final_message=True) == "<user>hello</>\n<assistant>so far, "
    assert _prompt(TEMPLATE, **asked).endswith("<assistant>so far,</>\n")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "add_generation_prompt to be false"),
        ({"add_generation_prompt": False}, "the assistant's"),
        ({"messages": [{"role": "assistant", "content": ""}], "add_generation_prompt": False}, "with a text"),
    ],
)
def test_what_cannot_be_continued_is_refused(client, asked, expected):
    body = {"continue_final_message": True, **asked}
    with pytest.raises(openai.BadRequestError, match=expected) as caught:
        client.chat.completions.create(model="fake", messages=body.pop("messages", HELLO), extra_body=body)
    assert caught.value.param == "continue_final_message"


def test_an_answer_continued_within_thoughts_has_no_calls(client):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    for begun, calls in ((f"<think>{call}", 0), (f"<think></think>{call}", 1)):
        talk: Any = [*HELLO, {"role": "assistant", "content": begun}]
        (choice,) = client.chat.completions.create(model="fake", messages=talk, tools=tools, extra_body=extra).choices
        assert len(choice.message.tool_calls or []) == calls


def test_a_template_that_reads_the_effort_gets_it():
    assert _prompt(EFFORT, reasoning_effort="low") == "(low)"
    assert _prompt(EFFORT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "(high)"


@pytest.fixture(scope="module")
def tiny(tiny_engine):
    """A client of a model."""
    with real_server(*tiny_engine) as live, connected(live) as client:
        yield client


def _tokens(tiny, prompt: str, **extra: Any) -> tuple[list[int], Any]:
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 8}
    (choice,) = tiny.completions.create(**asked, extra_body={"return_token_ids": True, **extra}).choices
    return choice.token_ids, choice


def test_bad_words_are_not_said(tiny, tiny_engine):
    tokenizer, tried = tiny_engine[0].tokenizer, 0
    for prompt in ("The quick", "What is", "def", "Zürich", "12", "a", "1, 2", "dog", "true", "x"):
        free, choice = _tokens(tiny, prompt)
        texts = {i: tokenizer.decode(free[i : i + 2]) for i in range(len(free) - 1)}
        words = [
            i for i, text in texts.items() if tokenizer.encode(text, False) == free[i : i + 2] and text == text.strip()
        ]
        if not words:
            continue
        at, tried = words[0], tried + 1
        held, _ = _tokens(tiny, prompt, bad_words=[texts[at], "never said"])
        # Up to the word's last token nothing changes, and there the next best one comes.
        best = sorted(choice.logprobs.top_logprobs[at + 1].values())
        assert held[: at + 1] == free[: at + 1]
        assert held[at + 1] != free[at + 1]
        assert token_text(tokenizer.token_bytes(held[at + 1])) in _with(choice, at + 1, best[-2])
        assert not any(held[i : i + 2] == free[at : at + 2] for i in range(len(held)))
        if tokenizer.encode(first := tokenizer.decode(free[at : at + 1]), False) == free[at : at + 1] and first.strip():
            assert free[at] not in _tokens(tiny, prompt, bad_words=[first])[0]
    assert tried > 2


def _with(choice: Any, place: int, logprob: float) -> list[str]:
    """Tokens at a place that have this logprob."""
    top = choice.logprobs.top_logprobs[place].items()
    return [text for text, value in top if value == logprob]


def test_bad_words_within_a_grammar(tiny):
    extra = {"structured_outputs": {"choice": ["a", "b"]}}
    said = {_tokens(tiny, "Well? ", bad_words=[word], **extra)[1].text for word in ("a", "b")}
    assert said == {"a", "b"}
    for words, choices in ((["a", "b"], ["a", "b"]), (["b", "c"], ["a b", "a c"])):  # at once, and on the way
        with pytest.raises(openai.BadRequestError, match="bad_words forbid every token .*; leave out words that") as no:
            _tokens(tiny, "Well? ", bad_words=words, structured_outputs={"choice": choices})
        assert no.value.code == "no_token_left"
    for words in ([""], ["  "], "word"):
        with pytest.raises(openai.BadRequestError, match="bad_words"):
            _tokens(tiny, "x", bad_words=words)


def test_logprobs_of_a_chats_prompt(tiny):
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "temperature": 0}
    extra = {"prompt_logprobs": 3, "return_token_ids": True}
    chat = tiny.chat.completions.create(**asked, n=2, extra_body=extra)
    ids = chat.prompt_token_ids
    text = tiny.completions.create(model="tiny", prompt=ids, echo=True, logprobs=3, max_tokens=0).choices[0].logprobs
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == len(ids)
    for token, found, logprob, top in zip(
        ids[1:], chat.prompt_logprobs[1:], text.token_logprobs[1:], text.top_logprobs[1:], strict=True
    ):
        assert found[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-6)
        assert {each["decoded_token"]: each["logprob"] for each in found.values()} == pytest.approx(top, abs=1e-6)
        assert {each["rank"] for each in found.values()} >= {1, 2, 3}
    with pytest.raises(openai.BadRequestError, match="'prompt_logprobs' are not in streams"):
        tiny.chat.completions.create(**asked, stream=True, extra_body=extra)


def test_special_tokens_in_messages_are_text_unless_tokens_are_wanted(tiny):
    talk: Any = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system"}]
    counts = {}
    for split in (None, True, False):
        extra = {"return_token_ids": True} | ({} if split is None else {"split_special_tokens": split})
        done = tiny.chat.completions.create(model="tiny", messages=talk, max_tokens=1, extra_body=extra)
        counts[split] = sum(token in (1, 2) for token in done.prompt_token_ids)
        body = {"messages": talk, **{key: value for key, value in extra.items() if key != "return_token_ids"}}
        same = httpx.post(str(tiny.base_url).replace("/v1/", "/tokenize"), json=body).json()
        assert same["tokens"] == done.prompt_token_ids
    assert counts == {None: 3, True: 3, False: 5}

"""Checks of answers and of streams' events, as JSON."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Check = Callable[[Any], bool]


def choices(count: int) -> Check:
    return lambda answer: [each["index"] for each in answer["choices"]] == list(range(count))


def said(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


def is_paris(answer: Any) -> bool:
    return said(answer) == '"Paris"'


def one_end(events: Any) -> bool:
    ends = [each["choices"][0]["finish_reason"] for each in events if each["choices"]]
    return ends[-1] is not None and ends.count(None) == len(ends) - 1


def usages(*told: bool) -> Check:
    """Tell whether events with choices, and the last one, tell of the usage."""

    def check(events: Any) -> bool:
        found = {bool(each.get("usage")) for each in events if each["choices"]}
        return found == {told[0]} and bool(events[-1].get("usage")) == told[1]

    return check


def echoes(answer: Any) -> bool:
    (choice,) = answer["choices"]
    return choice["text"].startswith("The quick brown") and choice["logprobs"]["token_logprobs"][0] is None


def begins_and_ends(events: Any) -> bool:
    first = events[0]["choices"][0]["delta"]
    return first["role"] == "assistant" and one_end(events) and len({each["id"] for each in events}) == 1


def vectors(count: int, normal: bool = True) -> Check:
    def check(answer: Any) -> bool:
        found = [math.fsum(x * x for x in each["embedding"]) for each in answer["data"]]
        return len(found) == count and (not normal or np.allclose(found, 1, atol=1e-5))

    return check


def token_sums(answer: Any) -> bool:
    """Tell whether the tokens of the logprobs make up the content."""
    tokens = answer["choices"][0]["logprobs"]["content"]
    return "".join(each["token"] for each in tokens) == said(answer) and all(each["logprob"] <= 0 for each in tokens)


def tops(count: int) -> Check:
    def check(answer: Any) -> bool:
        return {len(each["top_logprobs"]) for each in answer["choices"][0]["logprobs"]["content"]} == {count}

    return check


def completed(*kinds: str) -> Check:
    return lambda answer: [item["type"] for item in answer["output"]] == list(kinds)


def whole_stream(events: Any) -> bool:
    """Tell whether the deltas of a Responses stream are the text of its last event, and all belong to one response."""
    deltas = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    ids = {each["response"]["id"] for each in events if "response" in each}
    return (
        events[0]["type"] == "response.created"
        and ids == {last["id"]}
        and deltas == last["output"][0]["content"][0]["text"]
    )


def streams_logprobs(events: Any) -> bool:
    deltas = [each for each in events if each["type"] == "response.output_text.delta" and each["delta"]]
    return bool(deltas) and all(each["logprobs"] for each in deltas)

"""The requests of `python -m benchmarks llm --workload hostile`, each the costliest of its kind that a server reads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# As many messages, and lists, as a server takes by default; nested ones are a few less, for those around them.
MESSAGES, LISTS = 2048, 65_536
NESTED = LISTS - 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Attack:
    """One kind of request."""

    status: int  # of its answers
    path: str  # of the route
    # By their size in bytes, texts of JSON objects; sent in turn. None for a header without end.
    bodies: Callable[[int], list[str]] | None = None


def _text(size: int) -> list[str]:
    return [json.dumps({"prompt": ("the quick brown fox jumps " * (size // 26 + 1))[:size]})]


def _chat(size: int) -> list[str]:
    empty = {"role": "user", "content": ""}
    messages = [{**empty, "content": "x " * ((size // MESSAGES - len(json.dumps(empty))) // 2)}] * MESSAGES
    return [json.dumps({"messages": messages, "max_tokens": 1})]


def _schemas(size: int) -> list[str]:
    """Small, and the grammar is large; several, as what could be compiled is kept."""
    costly = [{"type": "integer", "multipleOf": 9_999_999 - 2 * turn, "minimum": -(10**15)} for turn in range(100)]
    return [json.dumps({"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}}) for schema in costly]


def _brackets(size: int) -> list[str]:
    """Too many lists; as many as may be, in one another; and side by side, with a text that fills the rest."""
    nested, flat = "[" * NESTED + "]" * NESTED, ",".join(["[]"] * NESTED)
    prompts = ",".join(["[]"] * (size // 3)), nested, f'{flat},"{"x" * (size - len(flat))}"'
    return [f'{{"prompt":[{prompt}]}}' for prompt in prompts]


def _numbers(size: int) -> list[str]:
    return [f'{{"prompt":[{",".join("7" * (size // 2))}]}}']


ATTACKS: Mapping[str, Attack] = {
    "a long text to tokenize": Attack(200, "/tokenize", _text),
    "a long chat": Attack(400, CHATS, _chat),
    "a costly schema": Attack(400, COMPLETIONS, _schemas),
    "a header without end": Attack(431, "/health"),
    "brackets": Attack(400, COMPLETIONS, _brackets),
    "numbers": Attack(400, COMPLETIONS, _numbers),
}

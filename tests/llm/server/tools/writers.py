"""Calls as models of each family write them, by code of the test's own."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def _as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_as_json(call)}\n</tool_call>" for call in calls)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_as_json(call, "parameters") for call in calls)


def llama3_tag(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + llama3_json(calls)


def mistral_old(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(map(_as_json, calls)) + "]"


def mistral_new(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(given, ensure_ascii=False)}" for name, given in calls)


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]123456789[ARGS]{json.dumps(given, ensure_ascii=False)}" for name, given in calls
    )


def granite(calls: Sequence[Call]) -> str:
    return "<|tool_call|>[" + ", ".join(map(_as_json, calls)) + "]"


def phi4(calls: Sequence[Call]) -> str:
    return granite(calls) + "<|/tool_call|>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        written = "".join(f"<parameter={key}>\n{_value(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def pythonic(calls: Sequence[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    return "[" + ", ".join(one(*call) for call in calls) + "]"


def llama4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


BAR = "\uff5c"


def _deepseek(calls: Sequence[Call], one: Callable[[str, str], str]) -> str:
    begin, end = (f"<{BAR}tool▁call▁{word}{BAR}>" for word in ("begin", "end"))
    written = "\n".join(begin + one(name, json.dumps(given, ensure_ascii=False)) + end for name, given in calls)
    return f"<{BAR}tool▁calls▁begin{BAR}>{written}<{BAR}tool▁calls▁end{BAR}>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    return _deepseek(calls, lambda name, given: f"function<{BAR}tool▁sep{BAR}>{name}\n```json\n{given}\n```")


def deepseek_v31(calls: Sequence[Call]) -> str:
    return _deepseek(calls, lambda name, given: f"{name}<{BAR}tool▁sep{BAR}>{given}")


# By the parser that reads it; those that open without a tag can only begin an answer.
WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama3_json),
    "llama3_tag": ("llama3_json", llama3_tag),
    "mistral_old": ("mistral", mistral_old),
    "mistral_new": ("mistral", mistral_new),
    "mistral_args": ("mistral", mistral_args),
    "granite": ("granite", granite),
    "phi4": ("granite", phi4),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "pythonic": ("pythonic", pythonic),
    "llama4": ("pythonic", llama4),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v3", deepseek_v31),
}
BARE = {"llama3_json", "pythonic"}

"""In which form a model's chat template shows tool calls that were made earlier in a conversation.

OpenAI's API has `content: null` beside calls, and arguments as text. Most templates want arguments as objects and take
null or an empty text alike. DeepSeek's R1 fails on objects, and shows calls only beside null. What fits is found by
rendering a conversation whose words are known.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.text.utf8_stream import whole_characters

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

NAME, KEY, VALUE, SAID, RESULT = "probe_name", "probe_key", "probe_value", "probe_said", "probe_result"
CALL_ID = "probe0000"  # nine letters and digits, as Mistral's templates demand
PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "other", "description": "A probe.", "parameters": PARAMETERS}}]
AS_JSON = re.compile(rf'"{KEY}"\s*:\s*"{VALUE}"')
# How Python writes a dict, and JSON a text that holds JSON.
MISWRITTEN = (f"'{KEY}'", f'\\"{KEY}\\"')


class NoPlaceForResultsError(ConfigError):
    """A template that leaves out what called functions returned."""


@dataclass(frozen=True)
class CallForm:
    """The form of an assistant's message with tool calls of which a template shows everything.

    Attributes:
        empty: contents that stand for none, of null and an empty text; the first one is taken for those that are not
            among them. Without any the template shows no calls at all, and they are written as text.
        as_text: arguments are JSON as text, not objects.
        together: calls are shown of a message that has text, too; if not, it becomes two messages.
        results: messages of role `tool` are shown.

    """

    empty: tuple[str | None, ...] = (None, "")
    as_text: bool = False
    together: bool = True
    results: bool = True

    @classmethod
    def of(cls, render: Render) -> "CallForm":
        """Ask a template.

        Args:
            render: messages in, the prompt out; raises ConfigError for what the template refuses.

        """
        for as_text in (False, True):
            empty = tuple(content for content in ("", None) if _shown(render, content, as_text))
            if empty:
                results = _results(render, _called(empty[0], as_text))
                return cls(empty, as_text, _shown(render, SAID, as_text), results)
        return cls(empty=(), results=_results(render, {"role": "assistant", "content": SAID}))

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in this form, others as they are.

        Raises:
            NoPlaceForResultsError: for a message of role `tool` which the template would leave out.

        """
        if not self.results and any(message.get("role") == "tool" for message in messages):
            message = (
                "this model's chat template leaves out messages of role 'tool': send results as the user's messages"
            )
            raise NoPlaceForResultsError(message)
        return [made for message in messages for made in self._fitted(message)]

    def _fitted(self, message: Message) -> Iterable[Message]:
        calls, content = message.get("tool_calls"), message.get("content")
        if not calls:
            # Of a message without calls none is an empty text: templates would write "None".
            return [{**message, "content": ""} if "content" in message and content is None else message]
        if not self.empty:
            written = [content or "", *map(_as_written, calls)]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            return [{**rest, "content": "\n".join(filter(None, written))}]
        if not content:
            return [{**message, "content": content if content in self.empty else self.empty[0], **self._calls(calls)}]
        if self.together:
            return [{**message, **self._calls(calls)}]
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return [said, {"role": message["role"], "content": self.empty[0], **self._calls(calls)}]

    def _calls(self, calls: Sequence[Message]) -> dict[str, Any]:
        return {"tool_calls": [_with_text(call) for call in calls] if self.as_text else calls}


def _with_text(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _json(function["arguments"])}}


def _as_written(call: Message) -> str:
    """Write calls in the way that a model does when it is forced to make one."""
    function = call["function"]
    return _json({"name": function["name"], "arguments": function["arguments"]})


def _json(value: Any) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))


def _called(content: str | None, as_text: bool) -> Message:
    call = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
    return {"role": "assistant", "content": content, "tool_calls": [_with_text(call) if as_text else call]}


def _rendered(render: Render, answer: Message) -> str | None:
    """A conversation with this answer; None if the template refuses it."""
    result = {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID, "name": NAME}
    try:
        return render([{"role": "user", "content": "probe"}, answer, result])
    except ConfigError:
        return None


def _shown(render: Render, content: str | None, as_text: bool) -> bool:
    """Tell whether the call is there, whole and as JSON or in the template's own way."""
    text = _rendered(render, _called(content, as_text))
    if text is None or not all(word in text for word in (NAME, KEY, VALUE)):
        return False
    if content is None and "None" in text.replace(_rendered(render, _called("", as_text)) or "", ""):
        return False
    return bool(AS_JSON.search(text)) or not any(wrong in text for wrong in MISWRITTEN)


def _results(render: Render, answer: Message) -> bool:
    text = _rendered(render, answer)
    return text is None or RESULT in text

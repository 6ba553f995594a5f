"""Chat templates: a model's own programs that make prompts of conversations; they run confined.

OpenAI's API has `content: null` beside calls, and arguments as text. Most templates want arguments as objects and take
null or an empty text alike. DeepSeek's R1 fails on objects, and shows calls only beside null. In which form a template
shows calls that were made earlier is found by rendering a conversation whose words are known.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.text.confined import IsolatedFunction, TooCostlyError
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
# How GPT-OSS's template reads what the model thought.
THINKING = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]""")
# Hundreds of times what a conversation as long as a server takes one costs.
SECONDS, MEMORY = 2.0, 512 << 20
_rendered = IsolatedFunction("fullstride.llm.text.rendering:renderer", seconds=SECONDS, memory=MEMORY)


class NoPlaceForToolsError(ConfigError):
    """Error of a template that ignores tools: its model was not trained to call them."""


class ChatTemplate:
    """Chat template of a model, and its separate template for conversations with tools, if any.

    Attributes:
        text: source of the template.
        tokens: special tokens' texts by their role.
        forms: forms in which it renders tool calls, without and with tools.

    """

    def __init__(self, text: str, tokens: Mapping[str, str], with_tools: str | None = None):
        """Compile the template.

        Args:
            text: source of the template, in Jinja.
            tokens: special tokens' texts by their role, such as `bos_token`, which templates write out.
            with_tools: source of the template for conversations with tools.

        Raises:
            ConfigError: if it is not Jinja.

        """
        self.text = text
        self.tokens = dict(tokens)
        self._with_tools = with_tools or text
        try:
            for each in dict.fromkeys((text, self._with_tools)):
                _rendered((each, None))
        except ConfigError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from None
        self.forms = {bool(tools): self._form(tools) for tools in (None, TOOLS)}

    def _form(self, tools: Sequence[Mapping[str, Any]] | None) -> "CallForm":
        try:
            return CallForm.of(lambda messages: self._text(messages, tools, False))
        except TooCostlyError:
            return CallForm(empty=())  # it renders nothing, which each further trial would take as long to find

    def reads(self, name: str) -> bool:
        """Return whether a variable is named in the template: others have no effect."""
        return name in self.text or name in self._with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as a prompt; see `Tokenizer.chat`.

        Raises:
            ConfigError: with the template's own words, or Jinja's, if it cannot render these messages, or takes more
                time, memory or text for them than a template may; or if it leaves out what called functions returned.

        """
        if THINKING.search(self._with_tools if tools else self.text) and not self.reads("reasoning_content"):
            messages = [_with_thinking(message) for message in messages]
        return self._text(self.forms[bool(tools)].fit(messages), tools, add_generation_prompt, **kwargs)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, **self.tokens, **kwargs}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return _rendered((self._with_tools if tools else self.text, given))
        except ConfigError as error:
            raise type(error)(f"the model's chat template refuses these messages: {error}") from None


@dataclass(frozen=True)
class CallForm:
    """The form of an assistant's message with tool calls of which a template shows everything.

    Attributes:
        empty: contents that stand for none, of null and an empty text; the first one is taken for those that are not
            among them. Without any the template shows no calls at all, and they are written as text.
        as_text: whether arguments are JSON texts, not objects.
        together: whether calls of a message with text are rendered; if not, it becomes two messages.
        results: whether messages of role `tool` are rendered.

    """

    empty: tuple[str | None, ...] = (None, "")
    as_text: bool = False
    together: bool = True
    results: bool = True

    @classmethod
    def of(cls, render: Render) -> "CallForm":
        """Find the form of tool calls that a template renders.

        Args:
            render: function from messages to the prompt; raises ConfigError if the template refuses them.

        """
        for as_text in (False, True):
            empty = tuple(content for content in ("", None) if _shown(render, content, as_text))
            if empty:
                results = _results(render, _called(empty[0], as_text))
                return cls(empty, as_text, _shown(render, SAID, as_text), results)
        return cls(empty=(), results=_results(render, {"role": "assistant", "content": SAID}))

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Convert messages with tool calls to this form; others are unchanged.

        Raises:
            ConfigError: for a message of role `tool` which the template would leave out.

        """
        if not self.results and any(message.get("role") == "tool" for message in messages):
            left_out = "this model's chat template leaves out messages of role 'tool'"
            raise ConfigError(f"{left_out}: send results as the user's messages")
        return [made for message in messages for made in self._fitted(message)]

    def _fitted(self, message: Message) -> Iterable[Message]:
        calls, content = message.get("tool_calls"), message.get("content")
        if not calls:
            # Of a message without calls none is an empty text: templates would write "None".
            return [{**message, "content": ""} if "content" in message and content is None else message]
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        if not self.empty:
            # As a model writes a call when it is forced to make one.
            functions = ({key: call["function"][key] for key in ("name", "arguments")} for call in calls)
            return [{**without, "content": "\n".join(filter(None, [content or "", *map(_json, functions)]))}]
        made = {"tool_calls": _with_text(calls) if self.as_text else calls}
        if not content:
            return [{**message, "content": content if content in self.empty else self.empty[0], **made}]
        if self.together:
            return [{**message, **made}]
        return [without, {"role": message["role"], "content": self.empty[0], **made}]


def _with_thinking(message: Message) -> Message:
    """Reasoning under the name `thinking`; before calls the content joins it, as the template takes one of both."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought or message.get("role") != "assistant":
        return message
    if message.get("tool_calls") and content:
        return {**message, "thinking": f"{thought}\n\n{content}", "content": ""}
    return {**message, "thinking": thought}


def _json(value: Any) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))


def _with_text(calls: Sequence[Message]) -> list[Message]:
    every = [(call, call["function"]) for call in calls]
    return [{**call, "function": {**each, "arguments": _json(each["arguments"])}} for call, each in every]


def _called(content: str | None, as_text: bool) -> Message:
    calls = [{"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}]
    return {"role": "assistant", "content": content, "tool_calls": _with_text(calls) if as_text else calls}


def _probed(render: Render, answer: Message) -> str | None:
    """Render a conversation with this answer; None if the template refuses it.

    Raises:
        TooCostlyError: if it takes too much.

    """
    result = {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID, "name": NAME}
    try:
        return render([{"role": "user", "content": "probe"}, answer, result])
    except TooCostlyError:
        raise
    except ConfigError:
        return None


def _shown(render: Render, content: str | None, as_text: bool) -> bool:
    """Return whether the whole call is rendered, as JSON or in the template's own format."""
    text = _probed(render, _called(content, as_text))
    if text is None or not all(word in text for word in (NAME, KEY, VALUE)):
        return False
    if content is None and "None" in text.replace(_probed(render, _called("", as_text)) or "", ""):
        return False
    return bool(AS_JSON.search(text)) or not any(wrong in text for wrong in MISWRITTEN)


def _results(render: Render, answer: Message) -> bool:
    text = _probed(render, answer)
    return text is None or RESULT in text

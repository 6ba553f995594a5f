"""Chat templates: Jinja in a sandbox, with the helpers that templates written for transformers rely on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fullstride.errors import ConfigError, in_a_line
from fullstride.llm.call_form import TOOLS, CallForm


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant said for training; here it is plain content."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Unlike Jinja's own filter this escapes no HTML: models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class NoPlaceForToolsError(ConfigError):
    """A template that leaves the tools out: its model was not trained to call them."""


class ChatTemplate:
    """A model's template, and the one it has for conversations with tools, if that is another.

    Attributes:
        text: of the template.
        tokens: special tokens' texts by their role.
        forms: in which it shows tool calls, of conversations without and with tools.

    """

    def __init__(self, text: str, tokens: Mapping[str, str], with_tools: str | None = None):
        """Compile the template.

        Args:
            text: in Jinja.
            tokens: special tokens' texts by their role, such as `bos_token`, which templates write out.
            with_tools: used instead wherever tools are given.

        Raises:
            ConfigError: if it is not Jinja.

        """
        environment = _environment()
        try:
            self._plain = environment.from_string(text)
            self._with_tools = environment.from_string(with_tools) if with_tools else self._plain
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no valid Jinja: {error}") from error
        self.text, self.tokens = text, dict(tokens)
        self.forms = {
            bool(tools): CallForm.of(lambda each, t=tools: self._text(each, t, False)) for tools in (None, TOOLS)
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; see `Tokenizer.chat`.

        Raises:
            ConfigError: with the template's own words, or Jinja's, if it cannot render these messages; or if it leaves
                out what called functions returned.

        """
        return self._text(self.forms[bool(tools)].fit(messages), tools, add_generation_prompt, **kwargs)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, **self.tokens, **kwargs}
        template = self._with_tools if tools else self._plain
        try:
            return template.render(**given, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # whatever a program that came with the model ends in
            reason = in_a_line(error)
            raise ConfigError(f"the model's chat template refuses these messages: {reason}") from error

"""Tool calls: what a chat asks for.

`none` hides the tools from the model. `auto` shows them; calls in the model's own format become tool_calls, and all
else is content, or reasoning. If a tool is `strict`, a grammar constrains what follows each tag. `required` and a named
tool force the text into one call of the right shape.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import BadRequestError
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.sampling import at_most
from fullstride.llm.server.schemas.chat import AllowedTools, ChatRequest, NamedTool, Tool
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.server.tools.call_grammar import calls_in_text, calls_or_json, one_call
from fullstride.llm.server.tools.call_parser import CallsOrContent
from fullstride.llm.server.tools.conformance import CallSchemas
from fullstride.llm.server.tools.parsers import ForcedTool, RequiredTool, ToolParser
from fullstride.llm.server.tools.shapes import json_schema, schema_of


@dataclass(frozen=True)
class ToolPlan:
    """Tools, shape and reader that a chat request needs.

    Attributes:
        answers: format of the model's answers.
        shown: to the model's template.
        forced: shape of a text that must be a call.
        caller: makes a parser of such a text.
        schemas: of the arguments that a call may have, by the functions' names.
        strict: names of the functions whose calls are to be constrained.
        single: whether one call is all that is wanted.

    """

    answers: AnswerFormat
    shown: list[Tool] = field(default_factory=list)
    forced: Structured | None = None
    caller: Callable[[], ToolParser] = ToolParser
    schemas: Mapping[str, Any] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    single: bool = False

    @classmethod
    def of(cls, body: ChatRequest, limits: ServerLimits, answers: AnswerFormat) -> "ToolPlan":
        """Read the request.

        Raises:
            BadRequestError: if there are too many tools, or the tool to call is none of them.

        """
        tools = body.tools or []
        _check(body, tools, limits)
        if not tools or body.tool_choice == "none":
            return cls(answers)
        schemas, choice = {tool.function.name: _schema(tool) for tool in tools}, body.tool_choice
        if isinstance(choice, AllowedTools):
            allowed, choice = _known(choice.allowed_tools.tools, schemas), choice.allowed_tools.mode
            schemas = {name: schema for name, schema in schemas.items() if name in allowed}
        names = frozenset(schemas)
        if isinstance(choice, NamedTool):
            (name,) = _known([choice], schemas)
            forced, caller = json_schema(schemas[name]), partial(ForcedTool, name)
            return cls(answers, tools, forced, caller, {name: schemas[name]}, names)
        if choice == "required":
            return cls(answers, tools, one_call(schemas), partial(RequiredTool, names), schemas, names)
        single = body.parallel_tool_calls is False
        strict = names & {tool.function.name for tool in tools if tool.function.strict}
        return cls(answers, tools, schemas=schemas, strict=strict, single=single)

    def for_prompt(
        self, thinking: bool, separates: bool, shape: Structured | None
    ) -> tuple[Callable[[], ToolParser], Structured | None, CallSchemas | None]:
        """Return a maker of the text's parsers, the constraint of the text, and the calls that it may have.

        Args:
            thinking: whether the prompt ends within reasoning.
            separates: whether reasoning is no content; what a grammar holds from its beginning has none.
            shape: that the request wants of a text without calls.

        Raises:
            BadRequestError: if no grammar can be formed of the calls that are to be constrained.

        """
        if self.forced is not None:
            return self.caller, self.forced, CallSchemas(self.caller, self.schemas, self.strict)
        if not self.shown and shape is not None:
            return ToolParser, shape, None
        most, constraint, form = 1 if self.single else None, shape, self.answers.calls
        separates = separates and shape is None
        reader = partial(self.answers.parser, self.schemas, most=most, thinking=thinking, separates=separates)
        if not self.shown:
            return reader, None, None
        held = {name: each if name in self.strict else {"type": "object"} for name, each in self.schemas.items()}
        if (answer := schema_of(shape)) is not None:
            if form.call is None or form.bare:
                raise _no_grammar(form.name, "response_format", "send tool_choice 'none' or 'required' with it")
            constraint = calls_or_json(form, held, answer, single=self.single)
            reader = partial(CallsOrContent, form, self.schemas, most)
        elif shape is None and self.strict:
            if form.call is None:
                raise _no_grammar(form.name, "tools", "leave out 'strict' (arguments are checked), or force the call")
            tags = self.answers.tags
            constraint = calls_in_text(form, held, single=self.single, thinking=thinking, tags=tags)
        return reader, constraint, CallSchemas(reader, self.schemas, self.strict)


def _no_grammar(name: str, param: str, advice: str) -> BadRequestError:
    message = f"'{param}' cannot constrain calls in this model's format, {name}, by a grammar; {advice}."
    return BadRequestError(message, param=param, code="unsupported_parameter")


def _check(body: ChatRequest, tools: list[Tool], limits: ServerLimits) -> None:
    at_most("tools", len(tools), limits.tools, " tools")
    size = sum(len(json.dumps(tool.function.parameters)) for tool in tools if tool.function.parameters)
    at_most("tools", size, limits.schema_bytes, " bytes of parameters")
    names = [tool.function.name for tool in tools]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise BadRequestError(f"Two of 'tools' have the name '{twice}'; give each a unique name.", param="tools")
    if body.tool_choice not in (None, "none") and not tools:
        raise BadRequestError("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")


def _known(chosen: list[NamedTool], schemas: Mapping[str, Any]) -> set[str]:
    names = {tool.function.name for tool in chosen}
    if unknown := names - schemas.keys():
        raise BadRequestError(f"Tool '{min(unknown)}' is not in 'tools'.", param="tool_choice")
    return names


def _schema(tool: Tool) -> dict[str, Any]:
    none = {"properties": {}, "additionalProperties": False}
    # Arguments are an object, whether the schema says so or not.
    return (tool.function.parameters or none) | {"type": "object"}

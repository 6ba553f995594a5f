"""Tool calls: what a chat asks for.

`none` hides the tools from the model. `auto` shows them; calls written as Hermes and Qwen models do, in `<tool_call>`
tags, become tool_calls, and all else is content, also what a model thinks before it answers. If a tool is `strict`, a
grammar constrains what follows each tag. `required` and a named tool force the text into one call of the right shape.
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
from fullstride.llm.server.tools.call_grammar import calls_in_text, calls_or_json, one_call
from fullstride.llm.server.tools.conformance import CallSchemas
from fullstride.llm.server.tools.parsers import CallsOrContent, ForcedTool, HermesTools, RequiredTool, ToolParser
from fullstride.llm.server.tools.shapes import json_schema, schema_of


@dataclass(frozen=True)
class ToolPlan:
    """Tools, shape and reader that a chat request needs.

    Attributes:
        shown: to the model's template.
        forced: shape of a text that must be a call.
        reader: makes a reader for one answer, from whether the prompt ends within reasoning; None if that is separated.
        schemas: of the arguments that a call may have, by the functions' names.
        strict: names of the functions whose calls are to be constrained.
        single: whether one call is all that is wanted.

    """

    shown: list[Tool]
    forced: Structured | None
    reader: Callable[[bool | None], ToolParser]
    schemas: Mapping[str, Any] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    single: bool = False

    @classmethod
    def of(cls, body: ChatRequest, limits: ServerLimits) -> "ToolPlan":
        """Read the request.

        Raises:
            BadRequestError: if there are too many tools, or the tool to call is none of them.

        """
        tools = body.tools or []
        _check(body, tools, limits)
        if not tools or body.tool_choice == "none":
            return cls([], None, lambda _: ToolParser())
        schemas, choice = {tool.function.name: _schema(tool) for tool in tools}, body.tool_choice
        if isinstance(choice, AllowedTools):
            allowed, choice = _known(choice.allowed_tools.tools, schemas), choice.allowed_tools.mode
            schemas = {name: schema for name, schema in schemas.items() if name in allowed}
        names = frozenset(schemas)
        if isinstance(choice, NamedTool):
            (name,) = _known([choice], schemas)
            return cls(tools, json_schema(schemas[name]), lambda _: ForcedTool(name), {name: schemas[name]}, names)
        if choice == "required":
            return cls(tools, one_call(schemas), lambda _: RequiredTool(names), schemas, names)
        single = body.parallel_tool_calls is False
        strict = names & {tool.function.name for tool in tools if tool.function.strict}
        reader = partial(HermesTools, names, 1 if single else None)
        return cls(tools, None, reader, schemas, strict, single)

    def for_prompt(self, thinking: bool, shape: Structured | None) -> tuple[Structured | None, CallSchemas | None]:
        """Return the constraint of the text, and the calls that it may have.

        Args:
            thinking: whether the prompt ends within reasoning.
            shape: that the request wants of a text without calls.

        """
        if not self.shown:
            return shape, None
        reader, constraint = partial(self.reader, thinking), self.forced or shape
        if self.forced is None:
            held = {name: each if name in self.strict else {"type": "object"} for name, each in self.schemas.items()}
            if (answer := schema_of(shape)) is not None:
                constraint = calls_or_json(held, answer, single=self.single)
                reader = partial(CallsOrContent, self.schemas, 1 if self.single else None)
            elif shape is None and self.strict:
                constraint = calls_in_text(held, single=self.single, thinking=thinking)
        return constraint, CallSchemas(reader, self.schemas, self.strict)


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

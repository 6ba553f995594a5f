"""Tool calls: what a chat asks for.

`none` hides the tools from the model. `auto` shows them; calls written as Hermes and Qwen models do, in `<tool_call>`
tags, become tool_calls, and all else is content, also what a model thinks before it answers. `required` and a named
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
from fullstride.llm.server.schemas.chat import ChatRequest, NamedTool, Tool
from fullstride.llm.server.tools.parsers import ForcedTool, HermesTools, RequiredTool, ToolParser
from fullstride.llm.server.tools.shapes import json_schema
from fullstride.llm.text.grammar import GUIDANCE
from fullstride.llm.text.json_schema import supported


@dataclass(frozen=True)
class ToolPlan:
    """Tools, shape and reader that a chat request needs.

    Attributes:
        shown: to the model's template.
        shape: that the text must have.
        reader: makes a reader for one answer, from whether the prompt ends within reasoning.
        schemas: of the arguments that a forced call may have, by the functions' names.

    """

    shown: list[Tool]
    shape: Structured | None
    reader: Callable[[bool], ToolParser]
    schemas: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: ChatRequest, limits: ServerLimits) -> "ToolPlan":
        """Read the request.

        Raises:
            BadRequestError: if there are too many tools, or the tool to call is none of them.

        """
        tools = body.tools or []
        _check(body, tools, limits)
        names = {tool.function.name for tool in tools}
        if not tools or body.tool_choice == "none":
            return cls([], None, lambda _: ToolParser())
        schemas = {tool.function.name: _schema(tool) for tool in tools}
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.name
            if name not in schemas:
                raise BadRequestError(f"Tool '{name}' is not in 'tools'.", param="tool_choice")
            return cls(tools, json_schema(schemas[name]), lambda _: ForcedTool(name), {name: schemas[name]})
        if body.tool_choice == "required":
            return cls(tools, _one_of(tools), lambda _: RequiredTool(names), schemas)
        return cls(tools, None, partial(HermesTools, names, 1 if body.parallel_tool_calls is False else None))


def _check(body: ChatRequest, tools: list[Tool], limits: ServerLimits) -> None:
    at_most("tools", len(tools), limits.tools, " tools")
    size = sum(len(json.dumps(tool.function.parameters)) for tool in tools if tool.function.parameters)
    at_most("tools", size, limits.schema_bytes, " bytes of parameters")
    names = [tool.function.name for tool in tools]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise BadRequestError(f"Two of 'tools' have the name '{twice}'; give each a unique name.", param="tools")
    if body.tool_choice not in (None, "none") and not tools:
        raise BadRequestError("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")


def _schema(tool: Tool) -> dict[str, Any]:
    none = {"properties": {}, "additionalProperties": False}
    # Arguments are an object, whether the schema says so or not.
    return (tool.function.parameters or none) | {"type": "object"}


def _one_of(tools: list[Tool]) -> Structured:
    # A schema of its own for each tool: references in it are to its own root.
    rules = []
    for tool in tools:
        before = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        # As in a schema that is not part of a grammar.
        made = supported(_schema(tool)).schema
        made = made | {"x-guidance": GUIDANCE} if isinstance(made, dict) else made
        rules.append(f'{before} %json {json.dumps(made)} "}}"')
    return Structured("grammar", "start: " + " | ".join(rules), wide=True)

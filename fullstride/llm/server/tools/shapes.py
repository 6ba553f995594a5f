"""The shape that a request wants of its text, whichever of the ways to say so it took, and its compilation: tried out
first, few at a time, and only while the request waits.
"""

import asyncio
import contextlib
import json
from threading import Event
from typing import Any

import anyio
import anyio.to_thread

from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import BadRequestError, UnavailableError
from fullstride.llm.server.schemas.base import SamplingRequest, StructuredOutputs
from fullstride.llm.server.schemas.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from fullstride.llm.server.turns import Turns
from fullstride.llm.text.grammar import Compiler
from fullstride.llm.text.grammar_trial import Trial

# One may be compiled while the next one is tried out.
AT_ONCE = 2


class SchemaCompiler:
    """Lives on an event loop."""

    def __init__(self, grammars: Compiler, queue_seconds: float):
        """Compile for the engine whose grammars these are; a request waits so long for those before it."""
        self._grammars, self._queue_seconds = grammars, queue_seconds
        self._trial, self._room = Trial(grammars.words), Turns(AT_ONCE)

    async def compile(self, shape: Structured) -> None:
        """See that the engine finds the shape compiled; cancelled, it ends the work.

        Raises:
            ConfigError: if it is not understood, or costs too much.
            UnavailableError: if others took too long.

        """
        if self._grammars.keeps(shape):
            return
        gone = Event()

        def work() -> None:
            size = self._trial.bytes_of(shape, lambda: not gone.is_set())
            self._grammars.matcher(shape, size)

        try:
            async with asyncio.timeout(self._queue_seconds), self._room:
                if self._grammars.keeps(shape):
                    return
                # Threads of its own: those that encode texts must not be used up.
                alone = anyio.CapacityLimiter(1)
                await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=alone)
        except TimeoutError:
            message = "Compiling the grammars of other requests took too long; try again later."
            raise UnavailableError(message, code="queue_timeout", retry_after=1) from None
        finally:
            gone.set()

    def tried(self, shape: Structured) -> None:
        """See whether a shape would be accepted; for a thread.

        Raises:
            ConfigError: if not.

        """
        self._trial.bytes_of(shape, lambda: True)


def structured(request: SamplingRequest, most_bytes: int) -> tuple[str, Structured | None]:
    """The parameter that asks for a shape, and the shape; or None for any text.

    Raises:
        BadRequestError: if there are several, or one of more than `most_bytes`.

    """
    asked = dict[str, Structured]()
    if isinstance(request, ChatRequest) and (shape := _of_format(request)) is not None:
        asked["response_format"] = shape
    if request.regex is not None:
        asked["regex"] = Structured("regex", request.regex)
    if request.grammar is not None:
        asked["grammar"] = Structured("grammar", request.grammar)
    if request.structured_outputs is not None:
        asked["structured_outputs"] = _of_vllm(request.structured_outputs)
    if len(asked) > 1:
        message = f"{' and '.join(asked)} both ask for a shape of the text; send one of them."
        raise BadRequestError(message, param=list(asked)[1])
    for param, shape in asked.items():
        if len(shape.value.encode()) > most_bytes:
            message = f"'{param}' has more than {most_bytes} bytes as text."
            raise BadRequestError(message, param=param, code="schema_too_large")
        return param, shape
    return "", None


def _of_format(request: ChatRequest) -> Structured | None:
    form = request.response_format
    if isinstance(form, JsonSchemaFormat) and form.json_schema.schema_ is not None:
        return json_schema(form.json_schema.schema_)
    return Structured("json_object") if isinstance(form, JsonObjectFormat | JsonSchemaFormat) else None


def json_schema(schema: Any) -> Structured:
    """Text that conforms to a schema."""
    return Structured("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def schema_of(shape: Structured | None) -> dict[str, Any] | None:
    """Return the schema of a shape of JSON; None if it is of another kind, or no object."""
    if shape is not None and shape.kind == "json_object":
        return {"type": "object"}
    with contextlib.suppress(ValueError, RecursionError):
        schema = json.loads(shape.value) if shape is not None and shape.kind == "json_schema" else None
        return schema if isinstance(schema, dict) else None
    return None


def _of_vllm(asked: StructuredOutputs) -> Structured:
    shapes = []
    if asked.json_ is not None:
        shapes.append(json_schema(asked.json_))
    if asked.json_object:
        shapes.append(Structured("json_object"))
    if asked.regex is not None:
        shapes.append(Structured("regex", asked.regex))
    if asked.choice is not None:
        shapes.append(Structured("grammar", "start: " + " | ".join(map(json.dumps, asked.choice)), wide=True))
    if asked.grammar is not None:
        shapes.append(Structured("grammar", asked.grammar))
    if len(shapes) != 1:
        message = "structured_outputs: expected exactly one of json, json_object, regex, choice, grammar."
        raise BadRequestError(message, param="structured_outputs")
    return shapes[0]

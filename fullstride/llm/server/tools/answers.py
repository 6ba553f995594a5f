"""Parser of an answer: its reasoning, content and calls, as the model's own format has them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fullstride.llm.server.tools.call_parser import CallParser
from fullstride.llm.server.tools.formats import CallFormat, format_of
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.server.tools.reasoning import MISTRAL, THINK, ReasoningParser, ThinkTags
from fullstride.llm.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class AnswerFormat:
    """Format of a model's answers.

    Attributes:
        calls: how it writes calls.
        tags: around reasoning.
        reasons: whether the model writes reasoning, as far as its template shows.

    """

    calls: CallFormat
    tags: ThinkTags
    reasons: bool

    @classmethod
    def of(cls, name: str, template: ChatTemplate | None) -> "AnswerFormat":
        """Choose the format of a template's model; `name` is that of its calls, or `auto`.

        Raises:
            ConfigError: see `format_of`.

        """
        calls = format_of(name, template)
        shown = [tags for tags in (MISTRAL, THINK) if template is not None and template.reads(tags.close)]
        return cls(calls, shown[0] if shown else THINK, bool(shown) or calls.parser is not None)

    def after(self, said: str) -> "AnswerFormat":
        """Return the format of the rest of an answer that begins like this, with no call without a tag any more."""
        if self.tags.goes_on(said) or not said.rpartition(self.tags.close)[2].strip():
            return self
        return replace(self, calls=replace(self.calls, bare=""))

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that are a part of the text."""
        return (*self.calls.marks, *self.tags)

    def parser(
        self, schemas: Mapping[str, Any], *, most: int | None = None, thinking: bool = False, separates: bool = False
    ) -> ToolParser:
        """Return a parser of one answer.

        Args:
            schemas: of the arguments of functions that may be called, by their names.
            most: calls.
            thinking: whether the prompt ends within reasoning.
            separates: whether reasoning is no content.

        """
        if self.calls.parser is not None:
            return self.calls.parser(schemas, most, separates)
        within = None if separates else thinking
        rest = CallParser(self.calls, schemas, most, within, self.tags) if schemas else ToolParser()
        return ReasoningParser(rest, thinking, self.tags) if separates else rest

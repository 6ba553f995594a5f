"""Chat templates: a model's own programs that make prompts of conversations; they run confined."""

from collections.abc import Mapping, Sequence
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.text.call_form import TOOLS, CallForm
from fullstride.llm.text.confined import Confined

# Hundreds of times what a conversation as long as a server takes one costs.
SECONDS, MEMORY = 2.0, 512 << 20
_rendered = Confined("fullstride.llm.text.rendering:renderer", seconds=SECONDS, memory=MEMORY)


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
        self.text = text
        self.tokens = dict(tokens)
        self._with_tools = with_tools or text
        try:
            for each in dict.fromkeys((text, self._with_tools)):
                _rendered((each, None))
        except ConfigError as error:
            raise ConfigError(f"the chat template is no valid Jinja: {error}") from None
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
            ConfigError: with the template's own words, or Jinja's, if it cannot render these messages, or takes more
                time, memory or text for them than a template may; or if it leaves out what called functions returned.

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
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return _rendered((self._with_tools if tools else self.text, given))
        except ConfigError as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from None

"""Formats of tool calls: one file and one row each."""

from fullstride.errors import one_of
from fullstride.llm.server.tools.formats import (
    deepseek_v3,
    gpt_oss,
    granite,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.text.chat_template import ChatTemplate

__all__ = ["FORMATS", "CallFormat", "format_of"]
# A template may have the signs of several, such as in an example: the first one counts.
FORMATS: dict[str, CallFormat] = {
    each.name: each
    for each in (
        gpt_oss.FORMAT,
        qwen3_coder.FORMAT,
        mistral.FORMAT,
        deepseek_v3.FORMAT,
        granite.FORMAT,
        hermes.FORMAT,
        llama3_json.FORMAT,
        pythonic.FORMAT,
    )
}


def format_of(name: str, template: ChatTemplate | None) -> CallFormat:
    """Return the format of a name, or with `auto` the one that a model's chat template shows; Hermes' if it shows none.

    Raises:
        ConfigError: if there is no such name.

    """
    one_of("--tool-parser", name, ("auto", *FORMATS))
    if name != "auto":
        return FORMATS[name]
    shown = (form for form in FORMATS.values() if template is not None and any(map(template.reads, form.signs)))
    return next(shown, hermes.FORMAT)

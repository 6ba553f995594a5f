"""Prompts and conversations, in the forms that vLLM accepts."""

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from fullstride.errors import ConfigError

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def conversations(messages: Any) -> Sequence[Sequence[Any]]:
    """One or several as several, none of them empty: a template makes a prompt of nothing, too.

    Raises:
        ConfigError: if it is no list of messages, nor one of such lists.

    """
    every = [messages] if _begins_with(messages, Mapping) else messages
    for conversation in every if _begins_with(every, Sequence) else [None]:
        if not _begins_with(conversation, object):
            raise ConfigError(
                f"messages={messages!r:.80}: expected a list of messages, such as "
                "[{'role': 'user', 'content': 'Hello'}], or a list of such lists"
            )
    return every


def _begins_with(values: Any, kind: type) -> bool:
    """Return whether `values` is a sequence that begins with a `kind`; a text is not a sequence here."""
    return isinstance(values, Sequence) and not isinstance(values, str) and bool(values) and isinstance(values[0], kind)


def is_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as several."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    given = list(prompts)
    return [given] if given and isinstance(given[0], Integral) else given  # type: ignore[list-item]


def token_ids(prompt: Any) -> list[int]:
    """Token ids; the elements of bytes are integers, too, but no tokens of the text that they hold.

    Raises:
        ConfigError: for what is neither a text nor integers.

    """
    with contextlib.suppress(TypeError):
        if not isinstance(prompt, bytes):
            return list(map(operator.index, prompt))
    raise ConfigError(f"{prompt!r:.80}: expected a text or a list of token ids (integers)")


def normalize(prompt: Prompt) -> Any:
    """A prompt without vLLM's wrapping.

    Raises:
        ConfigError: for a dict of anything else.

    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise ConfigError(
            f"a prompt has the keys {', '.join(prompt) or '(none)'}: expected either prompt or prompt_token_ids"
        )
    return next(iter(prompt.values()))

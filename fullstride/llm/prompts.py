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
    """Return one conversation or several as a list, none of them empty: a template would make a prompt of nothing.

    Raises:
        ConfigError: for anything but a list of messages or a list of such lists.

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
    """Return one prompt or several as a list."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    given = list(prompts)
    return [given] if given and isinstance(given[0], Integral) else given  # type: ignore[list-item]


def token_ids(prompt: Any) -> list[int]:
    """Return token ids; bytes are refused, since their elements are integers but not token ids.

    Raises:
        ConfigError: for what is neither a text nor integers.

    """
    with contextlib.suppress(TypeError):
        if not isinstance(prompt, bytes):
            return list(map(operator.index, prompt))
    raise ConfigError(f"{prompt!r:.80}: expected a text or a list of token ids (integers)")


def normalize(prompt: Prompt) -> Any:
    """Return a prompt without vLLM's dict around it.

    Raises:
        ConfigError: for a dict with other keys.

    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise ConfigError(
            f"a prompt has the keys {', '.join(prompt) or '(none)'}: expected either prompt or prompt_token_ids"
        )
    return next(iter(prompt.values()))

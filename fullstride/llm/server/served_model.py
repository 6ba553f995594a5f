"""Served model, as the routes see it."""

from collections.abc import Mapping, Sequence
from time import time

from fullstride.llm.server.errors import MOST_OF_A_NAME, BadRequestError, NotFoundError
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.text.special_text import SpecialText
from fullstride.llm.text.tokenizer import Tokenizer


class ServedModel:
    """A model and its names; the first one is the model's own, the others are taken, too."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Tokenizer,
        max_length: int,
        sampling: Mapping[str, int | float] | None = None,
        tool_parser: str = "auto",
        adapters: Sequence[str] = (),
    ):
        """Serve a model.

        Args:
            names: names that requests may give.
            tokenizer: tokenizer of the model.
            max_length: tokens of a sequence, prompt and completion together.
            sampling: fields of `SamplingParams` in place of OpenAI's defaults, for requests that leave them out.
            tool_parser: see `AnswerFormat.of`.
            adapters: names of LoRA adapters of the model, which requests may give as well.

        Raises:
            ConfigError: if there is no such parser.

        """
        self.names, self.tokenizer, self.max_length = tuple(names), tokenizer, max_length
        self.sampling, self.adapters = dict(sampling or {}), tuple(adapters)
        self.created = int(time())
        self.special = SpecialText(tokenizer)
        self.answers = AnswerFormat.of(tool_parser, tokenizer.template)
        # In bytes, so that a text's length bounds its number of tokens from below.
        self.longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    def name(self, asked: str | None) -> str:
        """Return the name for the response.

        Raises:
            NotFoundError: if there is no such model here.

        """
        if asked is None:
            return self.names[0]
        if asked in (*self.names, *self.adapters):
            return asked
        there = ", ".join((*self.names, *self.adapters))
        message = f"The model '{asked[:MOST_OF_A_NAME]}' does not exist; this server has {there}."
        raise NotFoundError(message, param="model")

    def adapter(self, name: str) -> str | None:
        """Return the LoRA adapter that a name of `name` stands for; None for the model itself."""
        return name if name in self.adapters else None

    def encode(self, text: str, param: str, *, special: bool) -> list[int]:
        """Encode a prompt; do not call it on the event loop, since its time grows with the text.

        Raises:
            BadRequestError: if it is far longer than the model can take: it is not even encoded.

        """
        self.check_length(text, param)
        return self.tokenizer.encode(text, special)

    def check_length(self, text: str, param: str) -> None:
        """Check a text before it is encoded.

        Raises:
            BadRequestError: if it is far longer than the model can take.

        """
        if len(text) > self.max_length * self.longest_token:
            raise self._too_long(f"more than {len(text) // self.longest_token}", param)

    def known(self, ids: list[int], param: str) -> list[int]:
        """Return `ids` unchanged if the model has all of them.

        Raises:
            BadRequestError: if the model does not have one of them.

        """
        if ids and max(ids) >= self.tokenizer.vocab_size:
            message = f"Token id {max(ids)} in '{param}': the model has ids from 0 to {self.tokenizer.vocab_size - 1}."
            raise BadRequestError(message, param=param)
        return ids

    def prompt(
        self, given: str | list[int], param: str, *, completion: int, special: bool, keep: int | None
    ) -> list[int]:
        """Read a prompt that is a text or token ids; see `encode`, `known` and `fitting`."""
        ids = self.encode(given, param, special=special) if isinstance(given, str) else self.known(given, param)
        return self.fitting(ids, param, completion, keep)

    def fitting(self, ids: list[int], param: str, completion: int = 1, keep: int | None = None) -> list[int]:
        """Return `ids` if a completion fits after them, or the last ones.

        Args:
            ids: tokens of a prompt.
            param: that they come from.
            completion: tokens of the completion.
            keep: how many of the last ids to return, at most; -1 for as many as fit.

        Raises:
            BadRequestError: if there are none, or too many for a completion of so many tokens to follow.

        """
        most = self.max_length - completion if keep == -1 else keep
        if most is not None:
            ids = ids[max(0, len(ids) - most) :]
        if not ids:
            raise BadRequestError(f"'{param}' has no tokens; send at least one.", param=param)
        if len(ids) + completion > self.max_length:
            raise self._too_long(f"{len(ids)} + {completion}", param)
        return ids

    def _too_long(self, tokens: str, param: str) -> BadRequestError:
        message = f"This model's maximum context length is {self.max_length} tokens; '{param}' and the completion have"
        return BadRequestError(
            f"{message} {tokens}. Shorten the prompt or request fewer tokens.",
            param=param,
            code="context_length_exceeded",
        )

"""A request as the engine sees it: one sequence for each of its n completions, with its text and stop texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fullstride.llm.engine.blocks import digest
from fullstride.llm.outputs import FinishReason, Logprob
from fullstride.llm.sampling_params import SamplingParams


class StopTextBuffer:
    """Text of one completion; what a stop text may begin with is held back until it is certain."""

    def __init__(self, detokenizer: Any, stops: Iterable[str] = (), include: bool = False):
        """Nothing yet; without a `Detokenizer` there is never any text."""
        self._detokenizer, self._stops, self._include = detokenizer, tuple(stops), include
        self._held = ""

    def push(self, token: int, watch: bool) -> tuple[str, str | None]:
        """Take a token.

        Args:
            token: of the output.
            watch: whether a stop text ends it by now; one that ends before is passed over.

        Returns:
            Text that is certain, and the stop text that was found, if one was.

        """
        if self._detokenizer is None:
            return "", None
        return self._add(self._detokenizer.push([token]), watch)

    def flush(self, watch: bool) -> tuple[str, str | None]:
        """Return the text held back at the end: half characters and incomplete stop texts."""
        if self._detokenizer is None:
            return "", None
        text, found = self._add(self._detokenizer.flush(), watch)
        rest, self._held = self._held, ""
        return text + rest, found

    def _add(self, new: str, watch: bool) -> tuple[str, str | None]:
        held, text = len(self._held), self._held + new
        # A stop text may begin in what was held back, but one that ended there was passed over.
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if watch and ends:
            at, stop = min(ends, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        # As much of the text's end as a stop text may begin with.
        sizes = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        keep = max(sizes, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


@dataclass
class Request:
    """Request as the engine accepted it.

    Attributes:
        prompt: token ids.
        limit: tokens of prompt and output together.
        stops: token ids that end it: its own, and the model's unless `ignore_eos` is set.
        arrived: time of arrival by the caller's clock, or None.

    """

    name: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    stops: tuple[int, ...]
    arrived: float | None = None


@dataclass(eq=False)
class Sequence:
    """One completion on its way.

    Attributes:
        tokens: of the prompt and of the output so far, as far as the host has read them.
        computed: tokens that have keys and values once everything dispatched has run, while it is a prompt; what
            follows is known when it is read.
        pending: most tokens that dispatched steps may still bring.
        flights: dispatched steps that it is in.
        blocks: of its block table, in order.
        named: how many of them are known by what they hold.
        names: digests of its full blocks.
        row: on the device; None while it waits.
        order: of its first admission; the newest gives way first.
        prefilling: the prompt, or what a preemption made of it, is not computed whole.
        matcher: of its grammar; `mask` says what it allows next.
        finish: why it ended.
        cached: of the prompt's tokens, how many were found in the cache at first.
        prompt_logprobs: so far; `told` once they were given out.

    """

    request: Request
    index: int
    tokens: list[int]
    key: tuple[int, int]
    text: StopTextBuffer
    matcher: Any = None
    mask: Any = None
    computed: int = 0
    pending: int = 0
    steps_in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    row: int | None = None
    order: int = -1
    prefilling: bool = True
    finish: FinishReason | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None
    prompt_logprobs_sent: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output that the host has read."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_length_in_flight(self) -> int:
        """Tokens that it has at most when everything dispatched has run."""
        return len(self.tokens) + self.pending

    @property
    def row_or_fail(self) -> int:
        """Its row, while it has one."""
        assert self.row is not None
        return self.row

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that were not computed for it; later completions find what the first one computed."""
        return 0 if self.index else self.num_cached_tokens or 0

    def digests(self, block: int) -> list[bytes]:
        """Names of its full blocks."""
        while (len(self.block_hashes) + 1) * block <= len(self.tokens):
            start = len(self.block_hashes) * block
            before = self.block_hashes[-1] if self.block_hashes else b""
            self.block_hashes.append(digest(before, self.tokens[start : start + block]))
        return self.block_hashes

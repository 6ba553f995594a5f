"""State of a request in the engine: one sequence per completion, with its text and stop texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from fullstride.llm.engine.acceptance import Acceptance
from fullstride.llm.engine.blocks import BlockTable, digest
from fullstride.llm.outputs import FinishReason, Logprob, Pooling
from fullstride.llm.sampling_params import SamplingParams


class StopTextBuffer:
    """Text of one completion; a possible beginning of a stop text is held back until it is decided."""

    def __init__(self, detokenizer: Any, stops: Iterable[str] = (), include: bool = False):
        """Start without text; without a `Detokenizer` there is never any."""
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, token: int, watch: bool) -> tuple[str, str | None]:
        """Add a token.

        Args:
            token: token id of the output.
            watch: whether stop texts apply yet; one that ends earlier is ignored.

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
        # A stop text may begin in the text held back, but one that ended there was ignored.
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if watch and ends:
            at, stop = min(ends, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        # The longest end of the text that a stop text may begin with.
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
        pooling: over which tokens of the prompt the last hidden states are pooled: `last`, `mean`, or None.
        adapter: name of its LoRA adapter, or None.
        slot: slot of the adapter on the device while a completion runs, or -1.
        cache_key: hash before its first block, so that sequences share blocks within one adapter and salt alone.

    """

    name: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    stops: tuple[int, ...]
    arrived: float | None = None
    pooling: Pooling | None = None
    adapter: str | None = None
    slot: int = -1
    cache_key: bytes = b""


@dataclass(eq=False)
class Sequence:
    """Completion in progress.

    Attributes:
        tokens: tokens of the prompt and of the output, as far as the host has read them.
        computed: tokens with keys and values once everything dispatched has run, while the prompt is prefilled; after
            that, tokens are counted when they are read.
        pending: tokens that dispatched steps may still produce, at most.
        steps_in_flight: number of dispatched steps that include it.
        tables: block tables, one for each group of layers.
        num_published_blocks: number of blocks registered in the prefix cache.
        block_hashes: hashes of its full blocks.
        row: row on the device; None while it waits.
        order: number of its first admission; the newest is preempted first.
        prefilling: whether part of the prompt (after a preemption: with the output so far) is still to be computed.
        matcher: matcher of its grammar; its `mask` has the tokens allowed next.
        finish: finish reason.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission.
        prompt_logprobs: logprobs of the prompt so far.
        prompt_logprobs_sent: whether they were emitted.
        pooled: sum of the hidden states that are pooled, so far.
        acceptance: what drafts of its tokens bring, with speculative decoding.

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
    tables: list[BlockTable] = field(default_factory=list)
    num_published_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    row: int | None = None
    order: int = -1
    prefilling: bool = True
    finish: FinishReason | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None
    prompt_logprobs_sent: bool = False
    pooled: Any = None
    acceptance: Acceptance | None = None
    _array: Any = None
    _copied: int = 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt has to be computed, though its keys may be cached."""
        wants_logprobs = self.prompt_logprobs is not None and not self.prompt_logprobs_sent
        return wants_logprobs or self.request.pooling == "mean"

    @property
    def num_blocks(self) -> int:
        """Number of blocks of tokens for which it has slots in all layers."""
        return min((len(table.blocks) for table in self.tables), default=0)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the host has read."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_length_in_flight(self) -> int:
        """Number of tokens, at most, once everything dispatched has run."""
        return len(self.tokens) + self.pending

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that were not computed for it; later completions reuse those of the first one."""
        return 0 if self.index else self.num_cached_tokens or 0

    def array(self) -> Int[np.ndarray, " T"]:
        """Return its tokens as an array, to which new ones are added."""
        if self._array is None:
            self._array = np.empty(self.request.limit, np.int32)
        count = len(self.tokens)
        self._array[self._copied : count] = self.tokens[self._copied :]
        self._copied = count
        return self._array[:count]

    def digests(self, block: int) -> list[bytes]:
        """Update and return the hashes of its full blocks."""
        while (len(self.block_hashes) + 1) * block <= len(self.tokens):
            start = len(self.block_hashes) * block
            before = self.block_hashes[-1] if self.block_hashes else self.request.cache_key
            self.block_hashes.append(digest(before, self.tokens[start : start + block]))
        return self.block_hashes

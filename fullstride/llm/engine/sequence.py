"""A request as the engine sees it: one sequence for each of its n completions."""

from dataclasses import dataclass, field
from typing import Any

from fullstride.llm.engine.blocks import digest
from fullstride.llm.engine.stop_text import Text
from fullstride.llm.outputs import FinishReason, Logprob
from fullstride.llm.sampling_params import SamplingParams


@dataclass
class Request:
    """What was asked for.

    Attributes:
        prompt: token ids.
        limit: tokens of prompt and output together.
        stops: token ids that end it: its own, and the model's unless they are ignored.
        arrived: by the caller's clock, or None.

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
    text: Text
    matcher: Any = None
    mask: Any = None
    computed: int = 0
    pending: int = 0
    flights: int = 0
    blocks: list[int] = field(default_factory=list)
    named: int = 0
    names: list[bytes] = field(default_factory=list)
    row: int | None = None
    order: int = -1
    prefilling: bool = True
    finish: FinishReason | None = None
    cached: int | None = None
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None
    told: bool = False

    @property
    def outputs(self) -> int:
        """Tokens of the output that the host has read."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def reach(self) -> int:
        """Tokens that it has at most when everything dispatched has run."""
        return len(self.tokens) + self.pending

    @property
    def place(self) -> int:
        """Its row, while it has one."""
        assert self.row is not None
        return self.row

    @property
    def spared(self) -> int:
        """Tokens of the prompt that were not computed for it; later completions find what the first one computed."""
        return 0 if self.index else self.cached or 0

    def digests(self, block: int) -> list[bytes]:
        """Names of its full blocks."""
        while (len(self.names) + 1) * block <= len(self.tokens):
            start = len(self.names) * block
            before = self.names[-1] if self.names else b""
            self.names.append(digest(before, self.tokens[start : start + block]))
        return self.names

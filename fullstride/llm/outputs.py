"""Outputs of a request: new tokens as they are generated, and the whole at the end."""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability before temperature and filters; rank 1 is the most probable."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Delta:
    """New tokens of one completion.

    Attributes:
        index: index among the request's n completions.
        text: new text that is final: no half characters, nothing that a stop text may still cut off.
        logprobs: for each token id, the chosen token first, then the most probable ones; None unless requested.
        finish_reason: None until the completion ends; exactly one delta of a completion has one.
        stop_reason: the stop text or token id that ended it; None for the model's own end token.
        error: message, if the finish reason is `error`.
        refused: code of an error that is the request's own fault: `too_costly`, or `no_token_left` by its `bad_words`.
        cached_tokens: prompt tokens found in the prefix cache; set in deltas of the first completion only.
        embedding: pooled hidden state of the prompt in the last delta of a request for it, fp64.

    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    refused: str = ""
    cached_tokens: int = 0
    embedding: Any = field(default=None, compare=False)


@dataclass
class CompletionOutput:
    """One completion of a prompt, whole; `cumulative_logprob` is the sum of its logprobs, None without them."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Logprob, ...]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions, as vLLM's `generate` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None
    cached_tokens: int = 0
    finished: bool = False

    def add(self, delta: Delta) -> None:
        """Merge a delta into the outputs."""
        completion = self.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or ()), *delta.logprobs]
            own = sum(place[0].logprob for place in delta.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + own
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            self.finished = all(other.finish_reason for other in self.outputs)


@dataclass
class EmbeddingOutput:
    """Embedding of a prompt, as many numbers as the model's hidden size."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A prompt and its embedding, as vLLM's `embed` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass
class ScoreOutput:
    """Log likelihood of a continuation.

    Attributes:
        logprob: sum of the logprobs of its tokens, after the prompt and one another.
        token_logprobs: logprob of each.
        token_ids: the continuation's tokens.
        greedy: whether each of them is the most probable one at its place.

    """

    logprob: float
    token_logprobs: list[float]
    token_ids: list[int]
    greedy: bool


@dataclass(frozen=True)
class EngineStats:
    """Counters (since the start) and gauges (current values) of an engine."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    compiles: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

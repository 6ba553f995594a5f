"""Processing of a step's results, token by token: ends, stop texts, grammars, logprobs."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fullstride.errors import ConfigError, one_line
from fullstride.llm.engine.dispatch import InFlightStep
from fullstride.llm.engine.sequence import Sequence
from fullstride.llm.kernels.interface import Sampled
from fullstride.llm.outputs import Delta, FinishReason, Logprob

logger = logging.getLogger(__name__)


class DeltaBuilder:
    """Delta under construction."""

    def __init__(self, sequence: Sequence):
        """Start without new tokens."""
        self.sequence, self.tokens, self.text = sequence, [], ""
        self.logprobs: list[tuple[Logprob, ...]] = []
        self.stop: str | int | None = None
        self.error, self.refused = "", ""

    def end(self, reason: FinishReason, stop: str | int | None = None, error: str = "", refused: str = "") -> None:
        """End the completion; text that was held back is emitted unless a stop text ended it."""
        sequence = self.sequence
        if not isinstance(stop, str):
            text, found = sequence.text.flush(reason not in ("abort", "error") and wants_output(sequence))
            self.text += text
            reason, stop = ("stop", found) if found else (reason, stop)
        sequence.finish = reason
        self.stop = stop
        self.error = error
        self.refused = refused

    def delta(self) -> Delta | None:
        """Return the delta, or None if nothing is new."""
        sequence, asked = self.sequence, self.sequence.request.params
        prompt, embedding = None, _embedding(sequence) if sequence.finish == "length" else None
        if (
            sequence.prompt_logprobs is not None
            and not sequence.prompt_logprobs_sent
            and (self.tokens or sequence.finish)
        ):
            prompt, sequence.prompt_logprobs_sent = tuple(sequence.prompt_logprobs), True
        if not (self.tokens or self.text or prompt or sequence.finish):
            return None
        return Delta(
            request_id=sequence.request.name,
            index=sequence.index,
            token_ids=tuple(self.tokens),
            text=self.text,
            logprobs=None if asked.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=prompt,
            finish_reason=sequence.finish,
            stop_reason=self.stop,
            error=self.error,
            refused=self.refused,
            cached_tokens=sequence.num_cached_prompt_tokens,
            embedding=embedding,
        )


def wants_output(sequence: Sequence) -> bool:
    """Return whether the output is long enough to be ended by a stop text."""
    return sequence.num_output_tokens >= sequence.request.params.min_tokens


def collect(
    flight: InFlightStep, ended: Callable[[Sequence], None], computed: Callable[[Sequence], None]
) -> Iterator[Delta]:
    """Wait for a step and yield its deltas, each at once, since reading the next one may fail.

    Args:
        flight: oldest dispatched step that was not read.
        ended: callback for each sequence that ends.
        computed: callback for each sequence with new tokens in the KV cache.

    """
    plan, sampled = flight.plan, flight.out.sampled
    tokens = np.asarray(sampled.token)
    wanted = any(sequence.request.params.logprobs is not None for sequence in plan.sequences)
    values = _on_host(sampled) if wanted else None
    _read_prompts(flight)
    _read_pooled(flight)
    brings = {id(chunk.sequence): chunk.last for chunk in plan.chunks}
    for row, sequence in enumerate(plan.sequences):
        sequence.steps_in_flight -= 1
        sequence.pending -= plan.steps if brings.get(id(sequence), True) else 0
        if sequence.finish is not None:
            continue
        draft = DeltaBuilder(sequence)
        for step, token in enumerate(tokens[:, row].tolist()):
            if token < 0 or sequence.finish is not None:
                break
            _take(draft, token, values, step, row)
        if draft.tokens and sequence.row is not None and not sequence.prefilling:
            computed(sequence)
        if sequence.finish is not None:
            ended(sequence)
        if (delta := draft.delta()) is not None:
            yield delta


def _take(draft: DeltaBuilder, token: int, values: Any, step: int, row: int) -> None:
    sequence, request = draft.sequence, draft.sequence.request
    sequence.tokens.append(token)
    draft.tokens.append(token)
    if values is not None and request.params.logprobs is not None:
        draft.logprobs.append(logprobs(values, (step, row), request.params.logprobs))
    if token in request.stops:
        # The model's own end token is not reported as a stop reason; a requested one is.
        own = token not in (request.params.stop_token_ids or ())
        if request.params.include_stop_str_in_output:
            draft.text += sequence.text.push(token, watch=False)[0]
        draft.end("stop", None if own else token)
        return
    text, stop = sequence.text.push(token, wants_output(sequence))
    draft.text += text
    if stop is not None:
        draft.end("stop", stop)
    elif len(sequence.tokens) >= request.limit:
        draft.end("length")
    elif sequence.matcher is not None:
        try:
            if not sequence.matcher.advance(token):
                raise RuntimeError(f"token {token} was sampled under the grammar's mask, but the grammar rejects it")
            sequence.mask = sequence.matcher.mask()
        except ConfigError as error:
            logger.warning("%s", error)
            draft.end("error", error=str(error), refused=getattr(error, "code", "too_costly"))
        except Exception as error:
            logger.exception("a grammar failed; its request ends with an error")
            draft.end("error", error=one_line(error))


def logprobs(values: Any, at: tuple[int, int], count: int) -> tuple[Logprob, ...]:
    """Return the logprob of the token itself, then those of the most probable ones."""
    own = Logprob(int(values.token[at]), float(values.logprob[at]), int(values.rank[at]))
    best = zip(values.top[at][:count].tolist(), values.top_logprobs[at][:count].tolist(), strict=True)
    return (own, *(Logprob(token, value, rank) for rank, (token, value) in enumerate(best, 1) if token >= 0))


def _read_prompts(flight: InFlightStep) -> None:
    """Store the logprobs of prompts; each scores the token that follows, so the first token has none."""
    chunks = [
        c for c in flight.plan.chunks if c.sequence.prompt_logprobs is not None and not c.sequence.prompt_logprobs_sent
    ]
    if not chunks or flight.out.prompt is None:
        return
    found = _on_host(flight.out.prompt)
    tile, first = found.token.shape[1], 0
    for chunk in flight.plan.chunks:
        request, places = chunk.sequence.request, chunk.sequence.prompt_logprobs
        if chunk in chunks and places is not None:
            for i in range(min(chunk.count, len(request.prompt) - chunk.start - 1)):
                asked = request.params.prompt_logprobs or 0
                places[chunk.start + i + 1] = logprobs(found, (first + i // tile, i % tile), asked)
        first += -(-chunk.count // tile)


def _read_pooled(flight: InFlightStep) -> None:
    """Add the sums of the chunks' pooled hidden states, from the first chunk on: a preempted prompt starts over."""
    wanted = [chunk.sequence.request.pooling is not None for chunk in flight.plan.chunks]
    if not any(wanted) or flight.out.pooled is None:
        return
    sums = np.asarray(flight.out.pooled, np.float64)[len(flight.plan.decodes) :]
    for chunk, own, wants in zip(flight.plan.chunks, sums, wanted, strict=False):
        if wants:
            fresh = chunk.start == 0 or chunk.sequence.pooled is None
            chunk.sequence.pooled = own if fresh else chunk.sequence.pooled + own


def _embedding(sequence: Sequence) -> Any:
    if sequence.pooled is None:
        return None
    return sequence.pooled / (len(sequence.request.prompt) if sequence.request.pooling == "mean" else 1)


def _on_host(sampled: Sampled) -> Any:
    """Copy a step's samples into NumPy arrays."""
    return sampled._replace(**{name: np.asarray(value) for name, value in sampled._asdict().items()})

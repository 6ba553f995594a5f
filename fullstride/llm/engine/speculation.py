"""Speculative decoding: which drafts the next step verifies, and whether it pays.

It pays if a step that verifies drafts brings more tokens for its time than a decode step, and both are measured. What
drafts would have brought is also known while none is verified, since the tokens are the same: a draft from before a
burst is compared with the burst. So a text that does not repeat costs nothing, and one that begins to is noticed.
"""

from collections.abc import Sequence as Several
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fullstride.llm.engine.acceptance import Acceptance, StepTimes
from fullstride.llm.engine.build import Model
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.dispatch import InFlightStep
from fullstride.llm.engine.prompt_lookup import PromptLookup
from fullstride.llm.engine.sequence import Sequence
from fullstride.llm.engine.shapes import CompiledShapes

# Weight of a draft in what is known of its sequence, and of all of them.
OWN, ALL = 0.15, 0.02
# How much better than decoding it has to be, since measurements err.
MARGIN = 1.05
# Decode steps after which drafts that cost something are tried again.
PROBE = 256


@runtime_checkable
class Proposer(Protocol):
    """Protocol of what drafts tokens; `free` if that costs next to nothing, so that some are only compared."""

    free: bool

    def draft(self, sequences: Several[Sequence], counts: Several[int]) -> list[list[int]]: ...


def proposer_of(loaded: Model, config: EngineConfig, devices: Several[Any] | None) -> Proposer | None:
    """Return what drafts tokens for a model; None without speculative decoding.

    Raises:
        ConfigError: for a draft model that cannot be loaded or run, or that has another vocabulary.

    """
    asked = config.speculative_config
    if asked is None:
        return None
    if asked.method == "ngram":
        return PromptLookup(asked.prompt_lookup_min, asked.prompt_lookup_max)
    from fullstride.llm.engine.draft_model import load_draft_model  # which has an engine of its own

    return load_draft_model(asked, config, loaded, devices)


class Speculator:
    """Choice of the drafts that a step verifies.

    Attributes:
        drafts: number of drafts that were verified.
        drafted: number of their tokens.
        accepted: number of these that were chosen.
        times: measured times of steps.

    """

    def __init__(self, proposer: Proposer, sizes: CompiledShapes):
        """Verify drafts of `proposer` in the programs of an engine of these sizes."""
        self._proposer, self._sizes = proposer, sizes
        self.drafts = self.drafted = self.accepted = 0
        self.times = StepTimes()
        self._all = Acceptance()
        self._read = 0.0
        self._idle = 0

    def pays(self, sequences: Several[Sequence]) -> bool:
        """Return whether it is likely to pay to verify drafts of these sequences, wherever they are."""
        if self._idle >= PROBE and self._rows(len(sequences)) is not None:
            return True
        most = self._sizes.drafts
        known = [self._known(sequence) for sequence in sequences if sequence.matcher is None]
        return self._better(len(sequences), sum((own.found * (own.tokens(most) - 1) for own in known), 0.0))

    def propose(self, sequences: Several[Sequence]) -> list[list[int]]:
        """Return a draft for each sequence, an empty one for none; or none at all if it does not pay.

        A sequence with a grammar has none, because the host makes the mask of each token after the one before it.
        """
        drafts = self._draft(sequences)
        self._idle = 0
        if not any(drafts):
            for sequence in () if self._proposer.free else sequences:
                self._known(sequence).observe(0, 0, 0, OWN)
            return []
        more = (self._known(own).tokens(len(draft)) - 1 for own, draft in zip(sequences, drafts, strict=True))
        # What a draft has cost is spent.
        return drafts if not self._proposer.free or self._better(len(sequences), sum(more, 0.0)) else []

    def observe(self, step: InFlightStep) -> None:
        """Wait for a step, and learn from it what drafts bring; its tokens are not in the sequences yet."""
        plan, tokens = step.plan, np.asarray(step.out.sampled.token)
        now = perf_counter()
        seconds, self._read = now - max(step.began, self._read), now
        if (rows := self._rows(len(plan.decodes))) is None:
            return
        ran = int((tokens[:, : len(plan.decodes)] >= 0).any(1).sum())
        self._idle = 0 if plan.drafts or self._proposer.free else self._idle + ran
        if plan.drafts:
            self.times.verified(rows, seconds)
        elif not plan.chunks and ran == plan.steps > 0:
            self.times.decoded(rows, seconds, ran)
        if plan.drafts or self._proposer.free:
            self._learn(plan.decodes, plan.drafts or self._draft(plan.decodes), tokens, verified=bool(plan.drafts))

    def _learn(
        self, sequences: Several[Sequence], drafts: Several[list[int]], tokens: np.ndarray, *, verified: bool
    ) -> None:
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            chosen = [token for token in tokens[:, row].tolist() if token >= 0]
            if sequence.finish is not None or sequence.matcher is not None or not chosen:
                continue
            pairs = zip(draft, chosen, strict=False)
            matched = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(chosen)))
            for known, weight in ((self._known(sequence), OWN), (self._all, ALL)):
                known.observe(len(draft), matched, len(chosen), weight)
            if verified and draft:
                self.drafts, self.drafted = self.drafts + 1, self.drafted + len(draft)
                self.accepted += matched

    def _draft(self, sequences: Several[Sequence]) -> list[list[int]]:
        most = self._sizes.drafts
        # A draft of the last token that a sequence may have saves no step.
        room = [0 if each.matcher else min(most, each.request.limit - len(each.tokens) - 1) for each in sequences]
        return self._proposer.draft(sequences, room)

    def _better(self, count: int, more: float) -> bool:
        """Return whether `more` tokens than `count` rows have in a decode step are worth the time of verifying."""
        rows = self._rows(count)
        return rows is not None and count + more > self.times.ratio(rows) * MARGIN * count

    def _rows(self, count: int) -> int | None:
        """Return the rows of the program that verifies drafts of so many sequences; None if there is none."""
        return next((size for size in self._sizes.verify_buckets if size >= count > 0), None)

    def _known(self, sequence: Sequence) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._all.found, self._all.accepted)
        return sequence.acceptance

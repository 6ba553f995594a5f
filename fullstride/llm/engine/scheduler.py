"""Scheduler of the next step: decode rows first, then prompt chunks in the rest of the token budget."""

from collections import deque
from dataclasses import dataclass, field, replace

from fullstride.llm.engine.blocks import BlockManager
from fullstride.llm.engine.sequence import Sequence
from fullstride.llm.engine.shapes import CompiledShapes


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt: `count` tokens from `start` on; the first output token follows the `last` one."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        """Return whether this is the sequence's last chunk."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True)
class StepPlan:
    """Plan of one dispatch.

    Attributes:
        decodes: sequences that decode one token per step.
        chunks: prompt chunks; with any there is one step.
        steps: number of decode steps, at most.
        admitted: sequences whose rows are new.
        early: whether to stop when any row ends, because a request waits.

    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    steps: int
    admitted: list[Sequence]
    early: bool

    @property
    def sequences(self) -> list[Sequence]:
        """Return all sequences of the plan, in the order of their rows."""
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]


@dataclass
class Scheduler:
    """First-come, first-served scheduler; if blocks run out, the newest sequence is preempted and recomputed later.

    With `window`, the most tokens that a token sees in any layer, a sequence gives back the blocks that none sees;
    its table has the scratch block in their place.
    """

    sizes: CompiledShapes
    blocks: BlockManager
    window: int | None = None
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    queries: int = 0
    hits: int = 0
    started: list[str] = field(default_factory=list)
    _admissions: int = 0
    _rows: list[int] = field(default_factory=list)

    def __post_init__(self):
        """Start with all rows free, low ones first."""
        self._rows = list(range(self.sizes.rows))[::-1]

    def anew(self, blocks: BlockManager) -> "Scheduler":
        """Return a scheduler with the same waiting requests and counts, for an empty KV cache; none may be running."""
        return replace(self, blocks=blocks, running=[], started=[])

    def plan(self) -> StepPlan | None:
        """Return the next plan, or None if nothing can run before a result is read."""
        before = self.preemptions
        decodes = self._decodes()
        admitted: list[Sequence] = []
        chunks = self._chunks(len(decodes), admitted, admit=self.preemptions == before)
        if not decodes and not chunks:
            return None
        steps = 1 if chunks or any(sequence.matcher for sequence in decodes) else self.sizes.steps
        for sequence in decodes if steps > 1 else ():
            self._grow(sequence, steps)
        plan = StepPlan(decodes, chunks, steps, admitted, bool(self.waiting))
        for sequence in plan.sequences:
            sequence.steps_in_flight += 1
        for sequence in [*decodes, *(chunk.sequence for chunk in chunks if chunk.last)]:
            sequence.pending += steps
        return plan

    def leave(self, sequence: Sequence) -> None:
        """Take back the row and blocks of a sequence that has ended or waits again.

        Steps that are on their way may still write to its blocks: they run before any that the blocks are given to.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release([block for block in sequence.blocks if block])
        if sequence.row is not None:
            self._rows.append(sequence.row)
        sequence.blocks = []
        sequence.row = None
        sequence.num_published_blocks = sequence.num_freed_blocks = 0

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence: return it to the head of the queue, without its blocks."""
        self.leave(sequence)
        sequence.computed, sequence.prefilling = 0, True
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def name(self, sequence: Sequence, computed: int) -> None:
        """Register the full blocks of a sequence's first `computed` tokens in the prefix cache."""
        size = self.sizes.block
        names = sequence.digests(size)
        while (sequence.num_published_blocks + 1) * size <= computed and sequence.num_published_blocks < len(names):
            self.blocks.publish(sequence.blocks[sequence.num_published_blocks], names[sequence.num_published_blocks])
            sequence.num_published_blocks += 1

    def forget(self, sequence: Sequence, position: int) -> None:
        """Free the blocks that no token from `position` on sees; steps that were dispatched read them before others."""
        if self.window is None or sequence.row is None:
            return
        first, last = sequence.num_freed_blocks, (position - self.window + 1) // self.sizes.block
        if last > first:
            self.blocks.release(sequence.blocks[first:last])
            sequence.blocks[first:last] = [0] * (last - first)
            sequence.num_freed_blocks = last

    def _decodes(self) -> list[Sequence]:
        ready: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.row is None or sequence.prefilling or sequence.max_length_in_flight >= sequence.request.limit:
                continue
            if sequence.matcher is not None and sequence.steps_in_flight:
                # The next mask depends on the token in flight.
                continue
            if self._room(sequence):
                ready.append(sequence)
        return ready

    def _room(self, sequence: Sequence) -> bool:
        """Make room for one more token, by preempting the newest if necessary; False if that is the sequence itself."""
        while not self._grow(sequence, 1):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, steps: int) -> bool:
        """Allocate blocks for `steps` steps; the last token of a sequence needs no slot."""
        tokens = min(sequence.max_length_in_flight - 1 + steps, sequence.request.limit - 1)
        missing = -(-tokens // self.sizes.block) - len(sequence.blocks)
        if missing > self.blocks.free:
            return False
        sequence.blocks += self.blocks.take(max(0, missing))
        return True

    def _chunks(self, decodes: int, admitted: list[Sequence], admit: bool) -> list[Chunk]:
        budget, tiles = self.sizes.budget - decodes, self.sizes.tile_buckets[-1]
        chunks: list[Chunk] = []
        for sequence in self._prompts(admitted, admit):
            left = len(sequence.tokens) - sequence.computed
            count = min(left, budget, tiles * self.sizes.tile)
            self.forget(sequence, sequence.computed)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget, tiles = budget - count, tiles - -(-count // self.sizes.tile)
            sequence.computed += count
            sequence.prefilling = count < left
            self.name(sequence, sequence.computed)
            if budget <= 0 or tiles <= 0:
                break
        return chunks

    def _prompts(self, admitted: list[Sequence], admit: bool):
        """Return chunks of running prompts, then of waiting ones for which there is room."""
        yield from [sequence for sequence in self.running if sequence.prefilling]
        while admit and self.waiting and self._rows and self._admit(self.waiting[0]):
            admitted.append(self.waiting.popleft())
            yield admitted[-1]

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a sequence: assign a row, the cached blocks of its prefix, and blocks for the rest."""
        if sequence.steps_in_flight:
            return False
        size = self.sizes.block
        # The last token is always recomputed: its logits are needed.
        names = [] if sequence.needs_whole_prompt else sequence.digests(size)[: (len(sequence.tokens) - 1) // size]
        found = self.blocks.match(names)
        fresh = -(-len(sequence.tokens) // size) - len(found)
        # Leave room for the running sequences to grow; otherwise this one would be preempted at once.
        if fresh + sum(map(self.blocks.is_free, found)) + len(self.running) > self.blocks.free:
            return False
        self.blocks.share(found)
        sequence.blocks = found + self.blocks.take(fresh)
        sequence.num_published_blocks = len(found)
        sequence.computed = len(found) * size
        sequence.row = self._rows.pop()
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens, sequence.order = sequence.computed, self._admissions
            self._admissions += 1
            self.started.append(sequence.request.name)
            self.queries, self.hits = self.queries + len(sequence.request.prompt), self.hits + sequence.computed
        # Running sequences are ordered by first admission, so a preempted one keeps its place.
        place = next((i for i, other in enumerate(self.running) if other.order > sequence.order), len(self.running))
        self.running.insert(place, sequence)
        return True

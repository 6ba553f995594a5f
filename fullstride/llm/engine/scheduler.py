"""Scheduler of the next step: decode rows first, then prompt chunks in the rest of the token budget."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from fullstride.llm.engine.blocks import BlockManager, BlockTable
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


@runtime_checkable
class Drafter(Protocol):
    """Protocol of `fullstride.llm.engine.speculation.Speculator`, as a scheduler needs it."""

    def pays(self, sequences: list[Sequence]) -> bool: ...

    def propose(self, sequences: list[Sequence]) -> list[list[int]]: ...


@dataclass(frozen=True)
class StepPlan:
    """Plan of one dispatch.

    Attributes:
        decodes: sequences that decode one token per step.
        chunks: prompt chunks; with any there is one step.
        steps: number of decode steps, at most.
        admitted: sequences whose rows are new.
        early: whether to stop when any row ends, because a request waits.
        drafts: of each decoding sequence the tokens to be verified, in one step; empty for decode steps.

    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    steps: int
    admitted: list[Sequence]
    early: bool
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Return all sequences of the plan, in the order of their rows."""
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]


@dataclass
class Scheduler:
    """First-come, first-served scheduler; if blocks run out, the newest sequence is preempted and recomputed later.

    In layers with a window a sequence gives back the blocks that no token sees any more; its table has the scratch
    block in their place. While its prompt is computed it has blocks for the window and the next chunk there.
    `seat` is asked last before a sequence is admitted, which waits if it returns False.
    Drafts are verified in steps without prompts, once all tokens that they follow have been read.
    """

    sizes: CompiledShapes
    blocks: BlockManager
    seat: Callable[[Sequence], bool] = lambda sequence: True
    drafter: Drafter | None = None
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
        decodes = self._ready()
        admitted: list[Sequence] = []
        chunks = self._chunks(len(decodes), admitted, admit=self.preemptions == before)
        if not decodes and not chunks:
            return None
        steps = 1 if chunks or any(sequence.matcher for sequence in decodes) else self.sizes.steps
        drafts: list[list[int]] = []
        if self.drafter is not None and not chunks and self.drafter.pays(decodes):
            if any(sequence.steps_in_flight for sequence in decodes):
                return None
            drafts = self.drafter.propose(decodes)
            steps = 1 + max(map(len, drafts), default=0)
        for sequence in decodes if steps > 1 else ():
            self._grow(sequence, _decoded(sequence, steps))
        plan = StepPlan(decodes, chunks, steps, admitted, bool(self.waiting), drafts)
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
        for table in sequence.tables:
            self.blocks.release([block for block in table.blocks if block])
        if sequence.row is not None:
            self._rows.append(sequence.row)
        sequence.tables = []
        sequence.row = None
        sequence.num_published_blocks = 0

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
            number = sequence.num_published_blocks
            for group, table in enumerate(sequence.tables):
                if table.blocks[number]:
                    self.blocks.publish(table.blocks[number], _of_group(names[number], group))
            sequence.num_published_blocks += 1

    def forget(self, sequence: Sequence, position: int) -> None:
        """Free the blocks that no token from `position` on sees; steps that were dispatched read them before others."""
        for table in sequence.tables:
            self.blocks.release(table.unseen(position, self.sizes.block))

    def cached(self, names: list[bytes]) -> list[list[int]]:
        """Return the cached blocks of a sequence's longest known prefix, for each group of layers.

        In layers with a window only the blocks that the next token sees have to be known; others are 0.
        """
        size, windows, best = self.sizes.block, self.sizes.windows, 0
        found: list[list[int]] = [[] for _ in windows]
        known = [0] * len(windows)  # number of the last blocks that are
        for count, name in enumerate(names, 1):
            for group, blocks in enumerate(found):
                blocks.append(self.blocks.find(_of_group(name, group)))
                known[group] = known[group] + 1 if blocks[-1] else 0
            least = [count - _unseen(window, count * size, size) for window in windows]
            if any(window is None and have < count for window, have in zip(windows, known, strict=True)):
                break
            best = count if all(have >= want for have, want in zip(known, least, strict=True)) else best
        ends = [_unseen(window, best * size, size) for window in windows]
        return [[0] * end + blocks[end:best] for end, blocks in zip(ends, found, strict=True)]

    def _ready(self) -> list[Sequence]:
        """Return the sequences that decode; those whose prompt is computed get blocks for their next chunk, too."""
        ready: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.row is None:
                continue
            if sequence.prefilling:
                self.forget(sequence, sequence.computed)
                self._room(sequence, min(len(sequence.tokens), sequence.computed + self.sizes.budget))
                continue
            if sequence.max_length_in_flight >= sequence.request.limit:
                continue
            if sequence.matcher is not None and sequence.steps_in_flight:
                # The next mask depends on the token in flight.
                continue
            if self._room(sequence, _decoded(sequence, 1)):
                ready.append(sequence)
        return ready

    def _room(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for so many tokens, by preempting the newest if necessary; False if that is the sequence itself."""
        while not self._grow(sequence, tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for so many tokens in all."""
        missing = [max(0, -(-tokens // self.sizes.block) - len(table.blocks)) for table in sequence.tables]
        if sum(missing) > self.blocks.free:
            return False
        for table, count in zip(sequence.tables, missing, strict=True):
            table.blocks += self.blocks.take(count)
        return True

    def _chunks(self, decodes: int, admitted: list[Sequence], admit: bool) -> list[Chunk]:
        budget, tiles = self.sizes.budget - decodes, self.sizes.tile_buckets[-1]
        chunks: list[Chunk] = []
        for sequence in self._prompts(admitted, admit):
            left = len(sequence.tokens) - sequence.computed
            count = min(left, budget, tiles * self.sizes.tile)
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
        groups = self.cached(names)
        found, shared = len(groups[0]), [block for blocks in groups for block in blocks if block]
        left = len(sequence.tokens) - found * size
        fresh = [self.sizes.held_blocks(window, left) for window in self.sizes.windows]
        # Leave room for the running sequences to grow; otherwise this one would be preempted at once.
        growth = len(self.running) * len(groups)
        needed = sum(fresh) + sum(map(self.blocks.is_free, shared)) + growth
        if needed > self.blocks.free or not self.seat(sequence):
            return False
        self.blocks.share(shared)
        sequence.tables = [
            BlockTable(window, blocks + self.blocks.take(count), _unseen(window, found * size, size))
            for window, blocks, count in zip(self.sizes.windows, groups, fresh, strict=True)
        ]
        sequence.num_published_blocks = found
        sequence.computed = found * size
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


def _decoded(sequence: Sequence, steps: int) -> int:
    """Return the tokens with slots after `steps` more steps; the last token of a sequence needs none."""
    return min(sequence.max_length_in_flight - 1 + steps, sequence.request.limit - 1)


def _unseen(window: int | None, position: int, size: int) -> int:
    """Return the number of blocks that no token from `position` on sees."""
    return 0 if window is None else max(0, (position - window + 1) // size)


def _of_group(name: bytes, group: int) -> bytes:
    return name + group.to_bytes(2, "little")

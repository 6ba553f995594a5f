"""The engines behind one server, each with a thread of its own, and the rule by which a prompt finds its engine."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from fullstride.llm.outputs import Delta, EngineStats
from fullstride.llm.server.engine_thread import EngineThread, Steps
from fullstride.llm.server.errors import ApiError
from fullstride.llm.server.job import Prompt

# How far above the least loaded engine one that knows more of a prompt may be, as a part of an engine's rows.
SLACK = 0.25


class Replica:
    """One engine, and what the event loop knows of it.

    Attributes:
        number: from 0.
        thread: that the engine runs in.
        stats: after its latest step.
        death: why it serves no more.
        load: completions that it was given and that have not ended.

    """

    def __init__(
        self,
        number: int,
        engine: Steps,
        on_step: Callable[["Replica", list[Delta], Sequence[str], EngineStats], None],
        on_refused: Callable[[str, ApiError], None],
        on_death: Callable[["Replica", BaseException], None],
    ):
        """Prepare; its thread is still to be started."""
        self.number, self.engine, self.stats = number, engine, engine.stats()
        self.thread = EngineThread(engine, partial(on_step, self), on_refused, partial(on_death, self))
        self.death: BaseException | None = None
        self.load = self.chosen = 0
        self._coming: Counter[bytes] = Counter()

    def up(self, stall_seconds: float) -> bool:
        """Whether it lives and moves."""
        return self.death is None and self.thread.step_seconds() < stall_seconds

    def known(self, names: Sequence[bytes]) -> int:
        """Blocks of a prompt that it has, or will have by the time: other prompts that it was given begin so."""
        found = self.engine.held(names) if names else 0
        return next((i for i in range(found, len(names)) if names[i] not in self._coming), len(names))

    def enter(self, names: Sequence[bytes], completions: int) -> None:
        """It is given a prompt."""
        self._coming.update(names)
        self.load += completions

    def leave(self, names: Sequence[bytes], completions: int) -> None:
        """A prompt has ended."""
        for name in names:
            # Counter's own subtraction looks at all that it has.
            if self._coming[name] == 1:
                del self._coming[name]
            else:
                self._coming[name] -= 1
        self.load -= completions


class Router:
    """Gives each prompt to an engine.

    Of the engines that live and move, and whose load is at most `SLACK` of an engine's rows above the least, the one
    that knows the longest beginning of the prompt; of those that know as much the least loaded, and of those the one
    that was chosen longest ago.
    """

    def __init__(self, replicas: Sequence[Replica], concurrent: int, stall_seconds: float):
        """Route among these, each of which runs so many completions at once."""
        self._replicas, self._slack, self._stall = replicas, max(1, int(SLACK * concurrent)), stall_seconds
        self._turn = 0

    def names(self, prompt: Prompt) -> list[bytes]:
        """What a prompt is known by; nothing where there is no choice."""
        return self._replicas[0].engine.names(prompt.token_ids) if len(self._replicas) > 1 else []

    def choose(self, names: Sequence[bytes]) -> Replica:
        """The engine for a prompt that is known so; at least one must live."""
        living = [replica for replica in self._replicas if replica.death is None]
        moving = [replica for replica in living if replica.up(self._stall)] or living
        least = min(replica.load for replica in moving)
        near = [replica for replica in moving if replica.load <= least + self._slack]
        best = max(near, key=lambda replica: (replica.known(names), -replica.load, -replica.chosen))
        self._turn += 1
        best.chosen = self._turn
        return best


def total(replicas: Sequence[Replica]) -> EngineStats:
    """Their numbers together; compiles are counted for the process."""
    stats = [replica.stats for replica in replicas]
    sums = {name: sum(getattr(each, name) for each in stats) for name in vars(stats[0])}
    return EngineStats(**sums | {"compiles": max(each.compiles for each in stats)})

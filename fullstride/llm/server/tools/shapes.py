"""Compiles what requests want their texts to be like: tried out first, few at a time, and only while they wait."""

import asyncio
from threading import Event

import anyio
import anyio.to_thread

from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import UnavailableError
from fullstride.llm.text.grammar import Compiler
from fullstride.llm.text.grammar_trial import Trial

# One may be compiled while the next one is tried out.
AT_ONCE = 2


class Shapes:
    """Lives on an event loop."""

    def __init__(self, grammars: Compiler, queue_seconds: float):
        """Compile for the engine whose grammars these are; a request waits so long for those before it."""
        self._grammars, self._queue_seconds = grammars, queue_seconds
        self._trial, self._room = Trial(grammars.words), anyio.CapacityLimiter(AT_ONCE)

    async def compile(self, shape: Structured) -> None:
        """See that the engine finds the shape compiled; cancelled, it ends the work.

        Raises:
            ConfigError: if it is not understood, or costs too much.
            UnavailableError: if others took too long.

        """
        if self._grammars.keeps(shape):
            return
        gone = Event()

        def work() -> None:
            size = self._trial.bytes_of(shape, lambda: not gone.is_set())
            self._grammars.matcher(shape, size)

        try:
            async with asyncio.timeout(self._queue_seconds), self._room:
                if self._grammars.keeps(shape):
                    return
                # Threads of its own: those that encode texts must not be used up.
                alone = anyio.CapacityLimiter(1)
                await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=alone)
        except TimeoutError:
            message = "The shapes of other requests took too long to compile; try again later."
            raise UnavailableError(message, code="queue_timeout", retry_after=1) from None
        finally:
            gone.set()

    def tried(self, shape: Structured) -> None:
        """See whether a shape would be accepted; for a thread.

        Raises:
            ConfigError: if not.

        """
        self._trial.bytes_of(shape, lambda: True)

"""Work on untrusted input in a separate process, with limits of time and memory.

Neither a chat template nor a grammar can be bounded from within: one multiplication, or one call of a library, may take
all memory or minutes, and no thread can be ended in the midst of it.
"""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock
from typing import Any

from fullstride.errors import ConfigError, one_line

# Interval of the checks whether the work is still wanted.
TICK_SECONDS = 0.05
COSTLY, REFUSED, MADE = "costly", "refused", "made"


class TooCostlyError(ConfigError):
    """Error of work that needs more time or memory than is allowed."""


class AbandonedError(Exception):
    """Error of work whose result nobody waits for any more."""


class FairLock:
    """Lock whose holders come in the order in which they asked for it.

    A plain lock goes to whoever takes it first, which is a thread that has just released it: one client that asks
    for costly work again and again would keep all others out.
    """

    def __init__(self) -> None:
        """Make a lock that nobody holds."""
        self._queue: deque[Event] = deque()  # the first one holds it
        self._lock = Lock()

    @contextmanager
    def next(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock, once all who asked before have released it.

        Raises:
            AbandonedError: if it is wanted no more.

        """
        mine = Event()
        with self._lock:
            self._queue.append(mine)
            self._queue[0].set()
        try:
            while not mine.wait(TICK_SECONDS):
                _check(wanted)
            yield
        finally:
            with self._lock:
                self._queue.remove(mine)
                if self._queue:
                    self._queue[0].set()


class IsolatedFunction:
    """Function that runs in a separate process, one call at a time; safe to share between threads.

    The process starts with the first call, and again after one that had to be ended.
    """

    def __init__(self, entry: str, setup: Any = None, *, seconds: float, memory: int):
        """Prepare.

        Args:
            entry: `module:name` of what is called with `setup` in the process, and returns the function, whose results
                have to be what JSON can hold.
            setup: argument of the entry; it must be picklable.
            seconds: computing time of one call.
            memory: bytes that the process may have beyond what it has when it is set up.

        """
        self._entry = entry
        self._setup = setup
        self._seconds = seconds
        self._memory = memory
        self._lock = FairLock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __call__(self, request: Any, wanted: Callable[[], bool] = lambda: True) -> Any:
        """Return the function's result.

        Args:
            request: argument of the function; it must be picklable.
            wanted: asked again and again; once it says no, the process is ended.

        Raises:
            TooCostlyError: if it took too much.
            ConfigError: if the function refuses the request, or the request cannot be written.
            AbandonedError: if it is wanted no more.

        """
        try:
            written = pickle.dumps(request)
        except Exception as error:  # of whatever the request's own classes raise
            raise ConfigError(f"expected plain values, such as texts, numbers, lists and dicts: {error}") from error
        with self._lock.next(wanted):
            return self._answer(written, wanted)

    def _answer(self, request: bytes, wanted: Callable[[], bool]) -> Any:
        process, connection = self._running = self._running or self._start()
        try:
            connection.send_bytes(request)
            while not connection.poll(TICK_SECONDS):
                _check(wanted)
            kind, value = json.loads(connection.recv_bytes())
        except BaseException as error:
            # Whatever it was: no later call may get what this one asked for.
            self._running, ended = None, isinstance(error, EOFError | OSError)
            code = process.wait() if ended else None
            _end(process, connection)
            if not ended:
                raise
            much = (
                f"{self._seconds:g} s of computing"
                if code == -signal.SIGPROF
                else f"{self._memory >> 20} MiB of memory"
            )
            raise TooCostlyError(f"too costly: more than {much}") from None
        if kind != MADE:
            raise (TooCostlyError if kind == COSTLY else ConfigError)(value)
        return value

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        # -P: nothing is imported from the folder that one happens to be in. A session of its own: Ctrl-C is not for it.
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        home = str(Path(__file__).parents[3])
        paths = os.pathsep.join((home, *filter(None, (os.environ.get("PYTHONPATH"),))))
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )
        connection = Connection(ours.detach())
        weakref.finalize(self, _end, process, connection)
        try:
            connection.send_bytes(pickle.dumps((self._entry, self._setup, self._seconds, self._memory)))
            connection.recv_bytes()
        except (EOFError, OSError):
            _end(process, connection)
            raise RuntimeError("the process for untrusted templates and grammars did not start; see stderr") from None
        return process, connection


def _check(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise AbandonedError


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def used_bytes() -> int:
    """Return the bytes of memory that this process uses, without freed ones."""
    with contextlib.suppress(AttributeError):  # of a C library that is not GNU's
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _done(work: Callable[[Any], Any], request: bytes) -> tuple[str, Any]:
    try:
        return MADE, work(pickle.loads(request))
    except MemoryError:
        return COSTLY, "too costly: more memory than is allowed"
    except TooCostlyError as error:
        return COSTLY, str(error)
    except BaseException as error:
        return REFUSED, one_line(error)


def _main(file: int) -> None:
    connection = Connection(file)
    entry, setup, seconds, memory = pickle.loads(connection.recv_bytes())
    module, _, name = entry.partition(":")
    work = getattr(import_module(module), name)(setup)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (statm := Path("/proc/self/statm")).exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection.send_bytes(b"ready")
    # The output of a library that aborts would put untrusted lines into the log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, wherever it is
            reply = json.dumps(_done(work, request)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(reply)


if __name__ == "__main__":
    _main(int(sys.argv[1]))

"""How processes agree with one another on the host, by gloo, without waiting for their devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullstride.errors import PeerError

T = TypeVar("T")


@contextmanager
def with_peers(device: str = "cpu") -> Iterator[None]:
    """Turns what a collective raises where another process has ended into a `PeerError`."""
    # On a GPU most errors are this process's own, as of memory that ran out: a peer's end has a type of its own there.
    lost = RuntimeError if device == "cpu" else dist.DistError
    try:
        yield
    except lost as error:
        reason = str(error).partition(". This is typically")[0]
        raise PeerError(f"another process of this run has ended; its own lines say why ({reason})") from None


class Hosts:
    """The hosts of a group of processes; without a group, this process alone.

    What is said to be collective must be called by all of them, in the same order, and raises `PeerError` where another
    one has ended.

    Attributes:
        rank: which this is, from 0.
        size: how many there are.

    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """Take a group of gloo's."""
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hosts":
        """Itself: there is one of each process."""
        return self

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def largest(self, value: int) -> int:
        """The largest of the processes' values; collective."""
        if self._group is None:
            return value
        found = torch.tensor(value)
        with with_peers():
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)

    def gather(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, on all of them; collective."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with with_peers():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def collect(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, on the first; none on the others; collective."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with with_peers():
            dist.gather_object(value, found, group=self._group, group_dst=0)
        return found or []

    def agreed(self, act: Callable[[], T]) -> T:
        """What `act` returns here, once it has returned everywhere; collective, which `act` must not be.

        Raises:
            PeerError: where it went well, with the reason, if it raises an exception elsewhere.

        """
        if self._group is None:
            return act()
        result, failed = None, None
        try:
            result = act()
        except Exception as error:
            failed = error
        told = self.gather(failed and f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        for rank, reason in enumerate(told):
            if reason is not None:
                raise PeerError(f"process {rank}: {reason}")
        return result  # pyright: ignore[reportReturnType]

    def part(self, count: int) -> range:
        """Which of so many things are this process's: a run of them, as long as the others' or one longer."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def led(self, act: Callable[[], T]) -> T:
        """What `act` returns on the first process, which alone runs it while the others wait; collective.

        Raises:
            PeerError: on the others, with the reason, if it raises an exception there.

        """
        if self._group is None:
            return act()
        result, failed = None, None
        if self.leads:
            try:
                result = act()
            except Exception as error:
                failed = error
        told: list[Any] = [(result, failed and f"{type(failed).__name__}: {failed}")]
        with with_peers():
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        if failed is not None:
            raise failed
        result, reason = told[0]
        if reason is not None:
            raise PeerError(f"process 0: {reason}")
        return result

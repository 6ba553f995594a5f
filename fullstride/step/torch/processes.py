"""The processes that train together: which one this is, and how they agree."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullstride import launched
from fullstride.errors import ConfigError, PeerError

T = TypeVar("T")

# All come within the first; the others wait for the second while the first one evaluates or saves.
MEETING, PATIENCE = timedelta(minutes=5), timedelta(hours=24)


@contextmanager
def _with_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". This is typically")[0]
        raise PeerError(f"another process of this run has ended; its own lines say why ({reason})") from None


class Processes:
    """A group of processes, each with a copy of the model; without a group, this process alone.

    What is said to be collective must be called by all of them, in the same order, and raises `PeerError` where another
    one has ended.

    Attributes:
        rank: which this is, from 0.
        size: how many there are.

    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """Take a group of gloo's.

        Raises:
            ConfigError: for another backend's, whose collectives have not been checked.

        """
        if group is not None and (found := dist.get_backend(group)) != "gloo":
            raise ConfigError(f"a process group of {found}, expected one of gloo: others have not been checked yet")
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def start_average(self, values: Tensor) -> Callable[[], None]:
        """Begin to replace `values` by their mean over the processes; collective. What is returned waits for it."""
        if self._group is None:
            return lambda: None
        with _with_peers():
            work = dist.all_reduce(values.div_(self.size), group=self._group, async_op=True)

        def wait() -> None:
            with _with_peers():
                assert work is not None
                work.wait()

        return wait

    def largest(self, value: int) -> int:
        """The largest of the processes' values; collective."""
        if self._group is None:
            return value
        found = torch.tensor(value)
        with _with_peers():
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)

    def gather(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, on all of them; collective."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with _with_peers():
            dist.all_gather_object(found, value, group=self._group)
        return found

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
        with _with_peers():
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        if failed is not None:
            raise failed
        result, reason = told[0]
        if reason is not None:
            raise PeerError(f"process 0: {reason}")
        return result

    @torch.no_grad()
    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the first process's; collective."""
        if self._group is None:
            return
        with _with_peers():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                tensor.copy_(whole)


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """All processes that torchrun has started, over gloo.

    Raises:
        ConfigError: if this one was not started by torchrun.

    """
    if not launched.by_torchrun():
        raise ConfigError(
            "distributed=ddp: this process is alone; start it with torchrun --nproc-per-node N -m fullstride ..."
        )
    # What processes of an earlier attempt have left in torchrun's store must not be taken for the present ones'.
    # Machines count their restarts each for itself.
    attempt = launched.restarts() if launched.machines() == 1 else 0
    store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MEETING)
    try:
        patient = dist.new_group(timeout=PATIENCE, backend="gloo")
        assert isinstance(patient, dist.ProcessGroup)
        yield Processes(patient)
    finally:
        dist.destroy_process_group()

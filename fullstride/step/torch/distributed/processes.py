"""Group of processes that train together: agreement by gloo on their hosts, and transfers of their tensors."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullstride.errors import PeerError
from fullstride.step.torch.distributed.peer_copies import PeerCopies
from fullstride.step.torch.distributed.transfer import EngineCopies, Transfer, with_peers
from fullstride.step.torch.metrics import Metrics, stacked, unstacked

T = TypeVar("T")

# NCCL does not end before the CUDA graphs that captured its transfers: it would wait for them forever.
_RECORDS: list[weakref.WeakMethod] = []


class Processes:
    """Group of processes, each with a copy of the model; without a group, this process alone.

    Tensors on a GPU travel by NCCL, on a stream of its own and also while a CUDA graph is captured, or by copies where
    processes share memory; tensors on the CPU by gloo, and so does what hosts agree on, without waiting for devices.
    What is said to be collective must be called by all of them, in the same order, and raises `PeerError` where another
    one has ended.

    Attributes:
        rank: rank of this process, from 0.
        size: number of processes.
        transfer: transport of gradients and weights.

    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        devices: dist.ProcessGroup | None = None,
        peers: PeerCopies | None = None,
        *,
        must_share: bool = False,
    ):
        """Take a gloo group, an NCCL group over the same processes if their tensors are on GPUs, and peers.

        Args:
            group: gloo group.
            devices: NCCL group.
            peers: processes that share memory, for gradients.
            must_share: whether memory that they cannot share is an error; else these gradients travel by NCCL.

        Raises:
            ConfigError: for another backend's, whose collectives have not been checked.

        """
        self._group, self._devices = group, devices
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.transfer = Transfer(group, devices)
        if peers is not None:
            self.transfer = EngineCopies(group, devices, peers, required=must_share)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        """Return itself: each process has only one."""
        return self

    @property
    def leads(self) -> bool:
        """True on the process that writes files and logs for all."""
        return self.rank == 0

    def largest(self, value: int) -> int:
        """Return the largest of the processes' values; collective."""
        if self._group is None:
            return value
        found = torch.tensor(value)
        with with_peers():
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)

    def gather(self, value: T) -> list[T]:
        """Return every process's value by rank, on all of them; collective."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with with_peers():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def collect(self, value: T) -> list[T]:
        """Return every process's value by rank on the first process, none on the others; collective."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with with_peers():
            dist.gather_object(value, found, group=self._group, group_dst=0)
        return found or []

    def agreed(self, act: Callable[[], T]) -> T:
        """Return `act()` once it has returned on every process; collective, which `act` must not be.

        Raises:
            PeerError: with the reason, if it raises an exception on another process but not here.

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

    def mean(self, values: Metrics) -> Metrics:
        """Return the means over the processes, of scalars that are the same on each by name; collective."""
        if self._group is None:
            return values
        means = stacked(values)
        self.transfer.start_average(means)()
        return unstacked(means, {name: value.dtype for name, value in values.items()})

    def part(self, count: int) -> range:
        """Return this process's run of `count` things, as long as the others' or one longer."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def led(self, act: Callable[[], T]) -> T:
        """Run `act` on the first process alone while the others wait, and return its result; collective.

        Raises:
            PeerError: on the others, with the reason, if it raises an exception there.

        """
        told: list[Any] = [self.agreed(lambda: act() if self.leads else None)]
        if self._group is not None:
            with with_peers():
                dist.broadcast_object_list(told, group=self._group, group_src=0)
        return told[0]

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that processes share, which PyTorch's statistics do not count."""
        return self.transfer.bytes

    @property
    def transfers(self) -> str:
        """Name of the transport of gradients: none, gloo, nccl or copies."""
        return self.transfer.name

    def call_at_end(self, let_go: Callable[[], None]) -> None:
        """Call a method before the processes part, to release captured graphs, if its object still lives."""
        if self._devices is not None:
            _RECORDS.append(weakref.WeakMethod(let_go))

    def abandon(self) -> None:
        """Abort pending work on a GPU: a collective that waits for a lost peer would never return."""
        if self._devices is not None:
            dist.distributed_c10d._abort_process_group(self._devices)

    @torch.no_grad()
    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the first process's; collective."""
        if self._group is None:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            with with_peers(tensor.device.type):
                dist.broadcast(whole, group=self.transfer.carrier(tensor), group_src=0)
            tensor.copy_(whole)


SINGLE = Processes()


def let_go() -> None:
    """Have every step that still lives release the transfers that it has captured."""
    while _RECORDS:
        if (method := _RECORDS.pop()()) is not None:
            method()
    gc.collect()  # those of objects that are dead, but in cycles

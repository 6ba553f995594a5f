"""The processes that train together: which one this is, and how they agree."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullstride.errors import ConfigError, PeerError
from fullstride.files import note
from fullstride.step.torch.peers import Peers, Shared
from fullstride.step.torch.symmetric import Refused

T = TypeVar("T")

# NCCL does not end before the CUDA graphs that its transfers were recorded in: it would wait for them forever.
_RECORDS: list[weakref.WeakMethod] = []
# PyTorch 2.13 has other names for them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@contextmanager
def _with_peers(device: str = "cpu") -> Iterator[None]:
    # On a GPU most errors are this process's own, as of memory that ran out: a peer's end has a type of its own there.
    lost = RuntimeError if device == "cpu" else dist.DistError
    try:
        yield
    except lost as error:
        reason = str(error).partition(". This is typically")[0]
        raise PeerError(f"another process of this run has ended; its own lines say why ({reason})") from None


class Processes:
    """A group of processes, each with a copy of the model; without a group, this process alone.

    What is said to be collective must be called by all of them, in the same order, and raises `PeerError` where another
    one has ended. Tensors on a GPU travel by NCCL, on a stream of its own and also while a CUDA graph is recorded;
    everything else by gloo, so that hosts agree without waiting for their devices.

    Attributes:
        rank: which this is, from 0.
        size: how many there are.

    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        devices: dist.ProcessGroup | None = None,
        peers: Peers | None = None,
        *,
        must_share: bool = False,
    ):
        """Take a group of gloo's, one of NCCL's over the same processes where their tensors are on GPUs, and peers.

        Args:
            group: of gloo's.
            devices: of NCCL's.
            peers: that share memory, for gradients.
            must_share: whether memory that they cannot share is an error; else these gradients travel by NCCL.

        Raises:
            ConfigError: for another backend's, whose collectives have not been checked.

        """
        for given, backend in ((group, "gloo"), (devices, "nccl")):
            if given is not None and (found := dist.get_backend(given)) != backend:
                raise ConfigError(f"a process group of {found}, expected one of {backend}: no other has been checked")
        self._group, self._devices, self._peers = group, devices, peers
        self._must_share, self._refused = must_share, False
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def _carrier(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """The group that tensors of that device travel by; None for a process alone."""
        if self._group is not None and tensor.is_cuda and self._devices is None:
            raise ConfigError(
                f"a tensor on {tensor.device} among {self.size} processes without NCCL: expected processes joined for "
                "GPUs; use joined('cuda'), or the CPU"
            )
        return self._devices if tensor.is_cuda else self._group

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    @property
    def shared_bytes(self) -> int:
        """Of memory that processes share, which PyTorch's statistics do not count."""
        return 0 if self._peers is None else self._peers.bytes

    @property
    def transfers(self) -> str:
        """What gradients travel by: none, gloo, nccl or copies."""
        if self._group is None:
            return "none"
        return "copies" if self._sharing is not None else "gloo" if self._devices is None else "nccl"

    @property
    def _sharing(self) -> Peers | None:
        """Peers for whatever has no memory that is shared already."""
        return None if self._refused else self._peers

    def shared(self, like: Tensor, size: int) -> Shared | None:
        """Zeros (size,) of a tensor's dtype that other processes write into, or None where they cannot; collective.

        Raises:
            Refused: if there is no such memory, and there must be.

        """
        if (peers := self._sharing) is None:
            return None
        try:
            return peers.shared(like, size)
        except Refused as refused:
            if self._must_share:
                raise Refused(f"transfers=copies: {refused}; transfers=nccl needs no such memory") from None
            self._refused = True
            if self.leads:
                note(f"further gradients travel by NCCL: {refused}")
        return None

    def start_average(self, values: Tensor | Shared) -> Callable[[], None]:
        """Begin to replace `values` by their mean over the processes; collective. What is returned waits for it.

        On a GPU it is the current stream that waits, not the host.
        """
        if isinstance(values, Shared):
            assert self._peers is not None
            return self._peers.start_mean(values)
        if (group := self._carrier(values)) is None:
            return lambda: None
        return self._started(values, lambda: dist.all_reduce(*self._mean(values), group=group, async_op=True))

    def start_shares(self, values: Tensor, own: Tensor) -> Callable[[], None]:
        """Begin to fill `own` with this process's part of the mean over the processes; collective.

        Args:
            values: (n m,) on each of n processes, no more than the largest memory that they share, if any; changed.
            own: (m,), elements rank m to rank m + m.

        """
        if (peers := self._sharing) is not None:
            return peers.start_share(values, own)
        if (group := self._carrier(values)) is None:
            own.copy_(values)
            return lambda: None
        mean, op = self._mean(values)
        return self._started(values, lambda: _reduce_scatter(own, mean, op, group, async_op=True))

    def start_whole(self, own: Tensor, whole: Tensor) -> Callable[[], None]:
        """Begin to fill `whole` (n m,) with the parts (m,) of all processes by rank; collective.

        `own` may be the very part of `whole` that it goes to.
        """
        if (group := self._carrier(own)) is None:
            whole.copy_(own)
            return lambda: None
        return self._started(own, lambda: _all_gather(whole, own, group, async_op=True))

    def start_wholes(self, parts: Sequence[tuple[Tensor, Tensor | Shared]]) -> Callable[[], None]:
        """Begin to fill several: pairs of `own` and `whole`, of which own is a part; collective."""
        waits = [self.start_whole(own, whole) for own, whole in parts if isinstance(whole, Tensor)]
        if shared := [whole for _, whole in parts if isinstance(whole, Shared)]:
            assert self._peers is not None
            waits.append(self._peers.start_whole(shared))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def total(self, values: Tensor) -> Tensor:
        """`values`, replaced by their sum over the processes; collective."""
        if (group := self._carrier(values)) is not None:
            self._started(values, lambda: dist.all_reduce(values, group=group, async_op=True))()
        return values

    def _mean(self, values: Tensor) -> tuple[Tensor, Any]:
        """What to reduce, and how, for a mean: gloo has none of its own."""
        return (values, dist.ReduceOp.AVG) if values.is_cuda else (values.div_(self.size), dist.ReduceOp.SUM)

    def _started(self, values: Tensor, send: Callable[[], Any]) -> Callable[[], None]:
        device = values.device.type
        with _with_peers(device):
            work = send()

        def wait() -> None:
            with _with_peers(device):
                work.wait()

        return wait

    def call_at_end(self, let_go: Callable[[], None]) -> None:
        """Call a method that lets go of what was recorded before the processes part, if its object still lives."""
        if self._devices is not None:
            _RECORDS.append(weakref.WeakMethod(let_go))

    def abandon(self) -> None:
        """End what is under way on a GPU: a collective that waits for a peer that is gone would never return."""
        if self._devices is not None:
            dist.distributed_c10d._abort_process_group(self._devices)

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

    def collect(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, on the first; none on the others; collective."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with _with_peers():
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
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            with _with_peers(tensor.device.type):
                dist.broadcast(whole, group=self._carrier(tensor), group_src=0)
            tensor.copy_(whole)


ALONE = Processes()


def let_go() -> None:
    """Have every step that still lives let go of what it has recorded of transfers."""
    while _RECORDS:
        if (method := _RECORDS.pop()()) is not None:
            method()
    gc.collect()  # those of objects that are dead, but in cycles

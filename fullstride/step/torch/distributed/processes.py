"""The processes that train together: how their tensors travel."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note
from fullstride.step.torch.distributed.host_group import Hosts, with_peers
from fullstride.step.torch.distributed.peer_copies import Peers, Shared
from fullstride.step.torch.distributed.symmetric_memory import Refused

# NCCL does not end before the CUDA graphs that its transfers were recorded in: it would wait for them forever.
_RECORDS: list[weakref.WeakMethod] = []
# PyTorch 2.13 has other names for them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Processes(Hosts):
    """A group of processes, each with a copy of the model; without a group, this process alone.

    Tensors on a GPU travel by NCCL, on a stream of its own and also while a CUDA graph is recorded, or by copies where
    processes share memory; tensors on the CPU by gloo, and so does what hosts agree on.
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
        super().__init__(group)
        self._devices, self._peers = devices, peers
        self._must_share, self._refused = must_share, False

    def _carrier(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """The group that tensors of that device travel by; None for a process alone."""
        if self._group is not None and tensor.is_cuda and self._devices is None:
            raise ConfigError(
                f"a tensor on {tensor.device} among {self.size} processes without NCCL: expected processes joined for "
                "GPUs; use joined('cuda'), or the CPU"
            )
        return self._devices if tensor.is_cuda else self._group

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
        with with_peers(device):
            work = send()

        def wait() -> None:
            with with_peers(device):
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

    @torch.no_grad()
    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the first process's; collective."""
        if self._group is None:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            with with_peers(tensor.device.type):
                dist.broadcast(whole, group=self._carrier(tensor), group_src=0)
            tensor.copy_(whole)


ALONE = Processes()


def let_go() -> None:
    """Have every step that still lives let go of what it has recorded of transfers."""
    while _RECORDS:
        if (method := _RECORDS.pop()()) is not None:
            method()
    gc.collect()  # those of objects that are dead, but in cycles

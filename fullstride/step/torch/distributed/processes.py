"""The processes that train together: how their tensors travel."""

import gc
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fullstride.step.torch.distributed.host_group import Hosts, with_peers
from fullstride.step.torch.distributed.peer_copies import Peers
from fullstride.step.torch.distributed.transfer import Copies, Transfer

# NCCL does not end before the CUDA graphs that its transfers were recorded in: it would wait for them forever.
_RECORDS: list[weakref.WeakMethod] = []


class Processes(Hosts):
    """A group of processes, each with a copy of the model; without a group, this process alone.

    Tensors on a GPU travel by NCCL, on a stream of its own and also while a CUDA graph is recorded, or by copies where
    processes share memory; tensors on the CPU by gloo, and so does what hosts agree on.

    Attributes:
        transfer: what gradients and weights travel by.

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
        super().__init__(group)
        self._devices = devices
        self.transfer = Transfer(group, devices)
        if peers is not None:
            self.transfer = Copies(group, devices, peers, required=must_share)

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that processes share, which PyTorch's statistics do not count."""
        return self.transfer.bytes

    @property
    def transfers(self) -> str:
        """Name of what gradients travel by: none, gloo, nccl or copies."""
        return self.transfer.name

    def total(self, values: Tensor) -> Tensor:
        """`values`, replaced by their sum over the processes; collective."""
        return self.transfer.total(values)

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
                dist.broadcast(whole, group=self.transfer.carrier(tensor), group_src=0)
            tensor.copy_(whole)


ALONE = Processes()


def let_go() -> None:
    """Have every step that still lives let go of what it has recorded of transfers."""
    while _RECORDS:
        if (method := _RECORDS.pop()()) is not None:
            method()
    gc.collect()  # those of objects that are dead, but in cycles

"""Transfers of gradients and weights between processes: collectives, or copies into memory that GPUs share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fullstride.errors import ConfigError, PeerError
from fullstride.runs.atomic_files import note
from fullstride.step.torch.distributed.peer_copies import CannotShareError, PeerCopies, SharedBuffers

Wait = Callable[[], None]
# PyTorch 2.13 has other names for them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@contextmanager
def with_peers(device: str = "cpu") -> Iterator[None]:
    """Turn errors of a collective whose peer has ended into a `PeerError`."""
    # On a GPU most errors are this process's own, as of memory that ran out: a peer's end has a type of its own there.
    lost = RuntimeError if device == "cpu" else dist.DistError
    try:
        yield
    except lost as error:
        reason = str(error).partition(". This is typically")[0]
        raise PeerError(f"another process of this run has ended; its own lines say why ({reason})") from None


class Transfer:
    """Begins transfers, each of them collective, and returns what waits for one: on a GPU its current stream does.

    This one begins collectives of PyTorch's process groups: gloo's on the CPU, NCCL's on a GPU, on a stream of its own
    and also while a CUDA graph is captured.
    """

    def __init__(self, group: dist.ProcessGroup | None, devices: dist.ProcessGroup | None):
        """Take a gloo group, and an NCCL group over the same processes if their tensors are on GPUs.

        Raises:
            ConfigError: for a group of another backend, whose collectives have not been checked.

        """
        for given, backend in ((group, "gloo"), (devices, "nccl")):
            if given is not None and (found := dist.get_backend(given)) != backend:
                raise ConfigError(f"a process group of {found}, expected one of {backend}: no other has been checked")
        self._group, self._devices = group, devices

    @property
    def name(self) -> str:
        """Name of the transport: none, gloo, nccl or copies."""
        if self._group is None:
            return "none"
        return "gloo" if self._devices is None else "nccl"

    @property
    def bytes(self) -> int:
        """Bytes of memory that processes share, which PyTorch's statistics do not count."""
        return 0

    def carrier(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the process group for tensors of that device; None for a process alone."""
        if self._group is not None and tensor.is_cuda and self._devices is None:
            raise ConfigError(
                f"a tensor on {tensor.device} among {dist.get_world_size(self._group)} processes without NCCL: "
                "expected processes joined for GPUs; use join_processes('cuda'), or the CPU"
            )
        return self._devices if tensor.is_cuda else self._group

    def shared(self, like: Tensor, size: int) -> SharedBuffers | None:
        """Return zeros (size,) of a tensor's dtype that other processes write into, or None if they cannot."""

    def start_average(self, values: Tensor | SharedBuffers) -> Wait:
        """Begin to replace `values` by their mean over the processes."""
        assert isinstance(values, Tensor)
        if (group := self.carrier(values)) is None:
            return lambda: None
        return self._started(values, lambda: dist.all_reduce(*self._mean(values), group=group, async_op=True))

    def start_shares(self, values: Tensor, own: Tensor) -> Wait:
        """Begin to fill `own` with this process's part of the mean over the processes.

        Args:
            values: (n m,) on each of n processes, no more than the largest memory that they share, if any; changed.
            own: (m,), elements rank m to rank m + m.

        """
        if (group := self.carrier(values)) is None:
            own.copy_(values)
            return lambda: None
        mean, op = self._mean(values)
        return self._started(values, lambda: _reduce_scatter(own, mean, op, group, async_op=True))

    def start_wholes(self, parts: Sequence[tuple[Tensor, Tensor | SharedBuffers]]) -> Wait:
        """Begin to fill several `whole` (n m,) with the parts `own` (m,) of all processes by rank.

        `own` may be the very part of `whole` that it goes to, and of a `SharedBuffers` it is.
        """
        waits: list[Wait] = []
        for own, whole in parts:
            if not isinstance(whole, Tensor):
                continue
            if (group := self.carrier(own)) is None:
                whole.copy_(own)
            else:
                waits.append(self._started(own, partial(_all_gather, whole, own, group, async_op=True)))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def total(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over the processes, and return them; collective."""
        if (group := self.carrier(values)) is not None:
            self._started(values, lambda: dist.all_reduce(values, group=group, async_op=True))()
        return values

    def _mean(self, values: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor and the operation to reduce for a mean; gloo has no mean of its own."""
        if values.is_cuda:
            return values, dist.ReduceOp.AVG
        return values.div_(dist.get_world_size(self._group)), dist.ReduceOp.SUM

    def _started(self, values: Tensor, send: Callable[[], Any]) -> Wait:
        device = values.device.type
        with with_peers(device):
            work = send()

        def wait() -> None:
            with with_peers(device):
                work.wait()

        return wait


class EngineCopies(Transfer):
    """Transfers by copy engines, and by collectives for tensors without shared memory."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        devices: dist.ProcessGroup | None,
        peers: PeerCopies,
        *,
        required: bool,
    ):
        """Also take peers; memory that they cannot share is an error if `required`, else left to NCCL."""
        super().__init__(group, devices)
        self.peers = peers
        self._required, self._refused = required, False

    @property
    def name(self) -> str:
        return super().name if self._refused else "copies"

    @property
    def bytes(self) -> int:
        return self.peers.bytes

    def shared(self, like: Tensor, size: int) -> SharedBuffers | None:
        """Return shared memory; None once NCCL has taken over.

        Raises:
            CannotShareError: if there is no such memory, and it is required.

        """
        if self._refused:
            return None
        try:
            return self.peers.shared(like, size)
        except CannotShareError as refused:
            if self._required:
                raise CannotShareError(f"transfers=copies: {refused}; transfers=nccl needs no such memory") from None
            self._refused = True
            if self.peers.rank == 0:
                note(f"further gradients travel by NCCL: {refused}")
        return None

    def start_average(self, values: Tensor | SharedBuffers) -> Wait:
        return self.peers.start_mean(values) if isinstance(values, SharedBuffers) else super().start_average(values)

    def start_shares(self, values: Tensor, own: Tensor) -> Wait:
        return super().start_shares(values, own) if self._refused else self.peers.start_share(values, own)

    def start_wholes(self, parts: Sequence[tuple[Tensor, Tensor | SharedBuffers]]) -> Wait:
        wait = super().start_wholes(parts)
        if not (shared := [whole for _, whole in parts if isinstance(whole, SharedBuffers)]):
            return wait
        copied = self.peers.start_whole(shared)

        def both() -> None:
            wait()
            copied()

        return both

"""Transfers by the copy engines of one machine's GPUs: each process writes into memory of the others.

NCCL's kernels sum on multiprocessors, which a concurrent backward pass then lacks: a product whose blocks fill the GPU
takes another turn for a few of them. Copy engines take none; what is left to the multiprocessors is one addition of
each gradient's parts. `docs/explanation/training-in-parallel.md` has both in numbers. The memory is PyTorch's symmetric
memory: physical memory of each GPU that all GPUs of a group have mapped.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Bytes that a process's place in a buffer is a multiple of: copies and kernels are fastest so.
ALIGNED = 256
NATIVE_ATOMICS = 3  # the driver's CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class CannotShareError(RuntimeError):
    """Memory that processes cannot share; raised by all of them together, with the first one's reason."""


def reason(error: Exception) -> str:
    """Return an error as one line."""
    return str(error).partition("\n")[0] or type(error).__name__


def atomics_reach(own: int, other: int) -> bool:
    """Return whether a GPU's atomic operations work on another's memory; True if the driver does not say."""
    found = ctypes.c_int(1)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return True
    failed = ask(ctypes.byref(found), NATIVE_ATOMICS, own, other)
    return bool(failed or found.value)


class SymmetricMemory:
    """PyTorch's symmetric memory of one group of processes."""

    def __init__(self, group: Any, device: torch.device, patience_ms: int, gather: Callable[[str], list[str]]):
        """Take a group of NCCL's on one machine; collective.

        Args:
            group: of processes.
            device: this process's GPU.
            patience_ms: how long a process that is missed is waited for before the GPU gives up.
            gather: what all of them say, by rank; collective.

        Raises:
            CannotShareError: if these GPUs cannot reach each other's memory.

        """
        self._group = group
        self._device = device
        self._patience = patience_ms
        self._gather = gather
        self._handle, _ = self._met(ALIGNED)

    def allocate(self, count: int) -> Sequence[Tensor]:
        """Allocate `count` zeroed bytes on every process and return them by rank; collective.

        Raises:
            CannotShareError: on all of them, if one cannot have it.

        """
        handle, own = self._met(count)
        theirs = [handle.get_buffer(rank, (count,), torch.uint8) for rank in range(handle.world_size)]
        theirs[handle.rank] = own
        return theirs

    def meet(self) -> None:
        """Let the current stream wait until all processes are here; their earlier writes are visible then."""
        self._handle.barrier(channel=0, timeout_ms=self._patience)

    def _met(self, count: int) -> tuple[Any, Tensor]:
        own = self._agreed(lambda: self._own(count))

        def met() -> Any:
            from torch.distributed import _symmetric_memory as symmetric

            return symmetric.rendezvous(own, self._group)

        # One that has no memory must not let the others wait for it there.
        return self._agreed(met), own

    def _own(self, count: int) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        try:
            own = symmetric.empty(count, dtype=torch.uint8, device=self._device)
        except RuntimeError:
            # What PyTorch keeps for tensors to come is nobody else's; with it there may be enough.
            torch.cuda.empty_cache()
            own = symmetric.empty(count, dtype=torch.uint8, device=self._device)
        own.zero_()
        # The others may write into it as soon as they have met this process.
        torch.cuda.synchronize(self._device)
        return own

    def _agreed(self, act: Callable[[], T]) -> T:
        """Return `act()` once it has returned on every process."""
        made, failed = list[T](), ""
        try:
            made.append(act())
        except Exception as error:
            failed = reason(error)
        if first := next(filter(None, self._gather(failed)), ""):
            raise CannotShareError(first)
        return made[0]


def mean_of(own: Tensor, rows: Tensor, rank: int, out: Tensor) -> None:
    """Fill `out` with the mean of some rows, of which one stands elsewhere, in one pass.

    Args:
        own: (m,), in place of row `rank`, which is not read; may be `out`.
        rows: (n, m), whose columns lie one after the other.
        rank: which row `own` is.
        out: (m,), of the same dtype.

    """
    from fullstride.step.torch.distributed.mean_kernel import BLOCK, mean_kernel  # Triton is a GPU's

    kernel: Any = mean_kernel
    grid = (-(-out.numel() // BLOCK),)
    kernel[grid](own, rows, out, out.numel(), rows.stride(0), RANK=rank, SIZE=len(rows), BLOCK=BLOCK)


@dataclass(frozen=True, eq=False)
class SharedBuffers:
    """Memory of one size on every process, into which all may write.

    Attributes:
        own: this process's (size,).
        everyones: each process's (size,), by rank.

    """

    own: Tensor
    everyones: tuple[Tensor, ...]

    def part(self, of: int, part: int) -> Tensor:
        """Return the part of a process's memory that belongs to another one, among n processes."""
        return self.everyones[of].chunk(len(self.everyones))[part]


class PeerCopies:
    """Transfers among the processes of one machine, in the order in which they are begun; all of them collective.

    What a process writes into another's memory lies in an inbox there, a row for each sender, or in a `SharedBuffers`
    that is given. There are two inboxes, used in turns: who writes into one has met the others since they read it.
    """

    def __init__(self, rank: int, size: int, memory: Any, device: torch.device):
        self.rank, self.size = rank, size
        self._memory = memory  # `SymmetricMemory`, or what allocates and meets as that does
        # First in line: few and short kernels, for which the other processes wait.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._inboxes: list[SharedBuffers] = []
        self._kept: list[SharedBuffers] = []  # that a record may still write into
        self._turn = 0
        self._given: weakref.WeakSet[SharedBuffers] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes of shared memory, which PyTorch's statistics do not count."""
        return sum(x.own.nbytes for x in (*self._given, *self._kept))

    def shared(self, like: Tensor, size: int) -> SharedBuffers:
        """Allocate memory (size,), a multiple of the number of processes, of a tensor's dtype."""
        given = self._allocate(size * like.element_size(), like.dtype)
        self._given.add(given)
        row = -(-size * like.element_size() // self.size // ALIGNED) * ALIGNED
        if not self._inboxes or row * self.size > self._inboxes[0].own.nbytes:
            self._inboxes = [self._allocate(row * self.size, torch.uint8) for _ in range(2)]
            self._kept += self._inboxes
        return given

    def _allocate(self, count: int, dtype: torch.dtype) -> SharedBuffers:
        found = [x.view(dtype) for x in self._memory.allocate(-(-count // ALIGNED) * ALIGNED)]
        size = count // found[0].element_size()
        return SharedBuffers(found[self.rank][:size], tuple(x[:size] for x in found))

    def start_mean(self, values: SharedBuffers) -> Callable[[], None]:
        """Begin to replace memory by its mean over the processes, the same everywhere to the last bit.

        What is returned makes the current stream wait for it.
        """
        with self._aside():
            own = values.part(self.rank, self.rank)
            mean_of(own, self._received(values.own), self.rank, own)
            self._give(values)
            self._memory.meet()
            return self._end()

    def start_share(self, values: Tensor, own: Tensor) -> Callable[[], None]:
        """Begin to fill `own` (m,) with this process's part of the mean of `values` (n m,)."""
        with self._aside():
            mean_of(values.chunk(self.size)[self.rank], self._received(values), self.rank, own)
            return self._end()

    def start_whole(self, wholes: Sequence[SharedBuffers]) -> Callable[[], None]:
        """Begin to give every process this one's part of some memory, and to get theirs."""
        with self._aside():
            # Until then others may still read what they have there.
            self._memory.meet()
            for each in wholes:
                self._give(each)
            self._memory.meet()
            return self._end()

    def _others(self) -> Iterator[int]:
        """List the other ranks, from the next one on: no two processes write to the same one at once."""
        return ((self.rank + i) % self.size for i in range(1, self.size))

    def _received(self, values: Tensor) -> Tensor:
        """Send each process its part, and get theirs of this one's part: (n, m), of which its own row is left out."""
        inbox, parts = self._inboxes[self._turn], values.chunk(self.size)
        self._turn = 1 - self._turn
        rows = lambda x: x.view(values.dtype).view(self.size, -1)[:, : parts[0].numel()]  # noqa: E731
        for to in self._others():
            rows(inbox.everyones[to])[self.rank].copy_(parts[to], non_blocking=True)
        self._memory.meet()
        return rows(inbox.own)

    def _give(self, memory: SharedBuffers) -> None:
        """Send the part that is this process's to all others."""
        for to in self._others():
            memory.part(to, self.rank).copy_(memory.part(self.rank, self.rank), non_blocking=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run on the stream of transfers, after the work that the current stream has been given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _end(self) -> Callable[[], None]:
        if self._stream is None:
            return lambda: None
        done = torch.cuda.Event()
        done.record(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(done)

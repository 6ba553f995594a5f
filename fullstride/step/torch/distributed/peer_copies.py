"""Transfers by the copy engines of one machine's GPUs: each process writes into memory of the others.

NCCL's kernels sum on multiprocessors, which a backward pass beside them then lacks: a product whose blocks fill the GPU
takes another turn for a few of them. Copy engines take none; what is left to the multiprocessors is one addition of
each gradient's parts. `docs/explanation/training-in-parallel.md` has both in numbers.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fullstride.step.torch.distributed.symmetric_memory import Symmetric

# Bytes that a process's place in a buffer is a multiple of: copies and kernels are fastest so.
ALIGNED = 256


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
class Shared:
    """Memory of one size on every process, into which all may write.

    Attributes:
        own: this process's (size,).
        everyones: each process's (size,), by rank.

    """

    own: Tensor
    everyones: tuple[Tensor, ...]

    def part(self, of: int, part: int) -> Tensor:
        """A process's memory's n-th part that is another one's, among n processes."""
        return self.everyones[of].chunk(len(self.everyones))[part]


class Peers:
    """The processes of one machine, with transfers in the order in which they are begun; all of them collective.

    What a process writes into another's memory lies in an inbox there, a row for each sender, or in a `Shared` that
    is given. There are two inboxes, used in turns: who writes into one has met the others since they read it.

    Attributes:
        rank: which this is.
        size: how many there are.

    """

    def __init__(self, rank: int, size: int, memory: "Symmetric", device: torch.device):
        """Nothing is transferred yet."""
        self.rank, self.size = rank, size
        self._memory = memory
        # First in line: few and short kernels, for which the other processes wait.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._inboxes: list[Shared] = []
        self._kept: list[Shared] = []  # that a record may still write into
        self._turn = 0
        self._given: weakref.WeakSet[Shared] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Of memory that is shared, which PyTorch's statistics do not count."""
        return sum(x.own.nbytes for x in (*self._given, *self._kept))

    def shared(self, like: Tensor, size: int) -> Shared:
        """Memory (size,), a multiple of the number of processes, of a tensor's dtype."""
        given = self._allocate(size * like.element_size(), like.dtype)
        self._given.add(given)
        row = -(-size * like.element_size() // self.size // ALIGNED) * ALIGNED
        if not self._inboxes or row * self.size > self._inboxes[0].own.nbytes:
            self._inboxes = [self._allocate(row * self.size, torch.uint8) for _ in range(2)]
            self._kept += self._inboxes
        return given

    def _allocate(self, count: int, dtype: torch.dtype) -> Shared:
        found = [x.view(dtype) for x in self._memory.allocate(-(-count // ALIGNED) * ALIGNED)]
        size = count // found[0].element_size()
        return Shared(found[self.rank][:size], tuple(x[:size] for x in found))

    def start_mean(self, values: Shared) -> Callable[[], None]:
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

    def start_whole(self, wholes: Sequence[Shared]) -> Callable[[], None]:
        """Begin to give every process this one's part of some memory, and to get theirs."""
        with self._aside():
            # Until then others may still read what they have there.
            self._memory.meet()
            for each in wholes:
                self._give(each)
            self._memory.meet()
            return self._end()

    def _others(self) -> Iterator[int]:
        """From the next one on: no two write to the same one at once."""
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

    def _give(self, memory: Shared) -> None:
        """Send the part that is this process's to all others."""
        for to in self._others():
            memory.part(to, self.rank).copy_(memory.part(self.rank, self.rank), non_blocking=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of transfers, behind what the current one has been given."""
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

"""Buckets of parameters whose gradients travel together: few, large transfers that overlap the backward pass."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fullstride.step.torch.distributed.processes import Processes

# Large enough for its time to be the transfer's, small enough for the last one not to be long.
BUCKET_BYTES = 25 * 2**20
# Elements that a parameter's place in a buffer is a multiple of: kernels read aligned tensors faster.
ALIGNED = 64


def filled(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters in order into buckets of one dtype and about `BUCKET_BYTES` each."""
    for _, alike in itertools.groupby(parameters, key=lambda p: p.dtype):
        bucket: list[nn.Parameter] = []
        for parameter in alike:
            bucket.append(parameter)
            if sum(p.nbytes for p in bucket) >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


class BucketLayout:
    """Places of tensors in one flat buffer, each in its own memory order.

    Attributes:
        size: elements of the buffer, a multiple of `parts`.

    """

    def __init__(self, like: Sequence[Tensor], parts: int = 1):
        """Lay out tensors of these shapes one after the other."""
        self._places, start = [], 0
        for tensor in like:
            # A view keeps strides that skip nothing; others become those of a contiguous tensor.
            strides = torch.empty_like(tensor, device="meta").stride()
            self._places.append((tensor.shape, strides, start, tensor.numel()))
            start += -(-tensor.numel() // ALIGNED) * ALIGNED
        unit = parts * ALIGNED
        self.size = -(-start // unit) * unit

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors within a buffer (size,)."""
        return [flat.as_strided(shape, strides, start) for shape, strides, start, _ in self._places]

    def gaps(self, flat: Tensor) -> list[Tensor]:
        """Return the slices between the gradients and after the last one."""
        ends = [start + count for *_, start, count in self._places]
        starts = [*(start for _, _, start, _ in self._places[1:]), self.size]
        return [flat[a:b] for a, b in zip(ends, starts, strict=True) if b > a]


class Bucket:
    """Gradients of `parameters` that become their means over the processes."""

    def __init__(self, parameters: list[nn.Parameter], processes: Processes):
        """Allocate a bucket for parameters of one dtype; collective."""
        self.parameters = parameters
        self._layout = BucketLayout(parameters, processes.size)
        self._memory = processes.transfer.shared(parameters[0].detach(), self._layout.size)
        self._means: list[Tensor] = []
        self._wait: Callable[[], None] | None = None

    @torch.no_grad()
    def send(self, gradients: Sequence[Tensor], processes: Processes) -> None:
        """Begin to average the gradients, which are copied."""
        flat = gradients[0].new_empty(self._layout.size) if self._memory is None else self._memory.own
        self._means = self._layout.views(flat)
        torch._foreach_copy_(self._means, list(gradients))
        self._wait = processes.transfer.start_average(self._memory or flat)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the means and write them in place of the gradients."""
        assert self._wait is not None
        self._wait()
        for parameter, mean in zip(self.parameters, self._means, strict=True):
            parameter.grad = mean
        self._wait, self._means = None, []

"""Asynchronous copies of tensors to the host, in order with the work that made them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fullstride.step.torch.metrics import stacked


class HostCopy:
    """Copy of a tensor on its way to the host."""

    def __init__(self, x: Tensor):
        """Start the copy, in order with the work of the current stream of its device."""
        self._copied: torch.cuda.Event | None = None
        self._host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=x.is_cuda)
        if x.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(x.device))  # which need not be the current device's

    def arrived(self) -> Tensor:
        """Wait for the copy and return it; from CUDA it is in pinned memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def to_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors on the host, in order; from CUDA each is awaited when the next one's work is launched.

    Those from CUDA are in pinned memory, which is taken from the whole machine: copy out of them, and let them go.

    Args:
        tensors: made as they are asked for, on any device.

    """
    waiting: HostCopy | None = None
    for x in tensors:
        sent = HostCopy(x)
        if waiting is not None:
            yield waiting.arrived()
        waiting = sent
    if waiting is not None:
        yield waiting.arrived()


class LateMetrics:
    """Copier of metrics to the host, behind the step that made them.

    `late(metrics)` returns the numbers of the call before, as floats, and None the first time; `last()` waits for the
    newest. The host never waits for a step that it has just launched.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sent: HostCopy | None = None

    def __call__(self, metrics: dict[str, Tensor]) -> dict[str, float] | None:
        """Return the numbers of the call before; these follow with the next call."""
        before = self.last() if self._sent is not None else None
        self._names = list(metrics)
        self._sent = HostCopy(stacked(metrics))
        return before

    def last(self) -> dict[str, float]:
        """Return the newest numbers, once they have arrived.

        Raises:
            ValueError: before the first call.

        """
        if self._sent is None:
            raise ValueError("no metrics yet; call it with a step's metrics first")
        found = dict(zip(sorted(self._names), self._sent.arrived().tolist(), strict=True))
        return {name: found[name] for name in self._names}

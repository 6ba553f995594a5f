"""Times of a few steps, taken without waiting for the device."""

import statistics
import time
from collections.abc import Callable

import torch

from fullstride.step.torch.metrics import Metrics
from fullstride.step.torch.runners.graph import WARM

# Steps before those that count: those before a capture, the capture itself, its first replays.
UNCOUNTED, COUNTED = WARM + 3, 8


class StepTimes:
    """Host and device times of the first steps that are as all later ones.

    Attributes:
        complete: whether enough were taken.

    """

    def __init__(self, device: torch.device):
        """Take times of steps on a device."""
        self._on_gpu = device.type == "cuda"
        self._made = 0
        self._host = list[float]()
        self._events = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    @property
    def complete(self) -> bool:
        """Return whether enough were taken."""
        return len(self._host) == COUNTED

    def timed(self, step: Callable[[], Metrics]) -> Metrics:
        """Make a step and take its times."""
        self._made += 1
        if self._made <= UNCOUNTED:
            return step()
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if self._on_gpu else None
        if events is not None:
            events[0].record()
        start = time.perf_counter()
        metrics = step()
        self._host.append(time.perf_counter() - start)
        if events is not None:
            events[1].record()
            self._events.append(events)
        return metrics

    def host_ms(self) -> float | None:
        """Return the median time until a step's call returned, in ms; None if none was taken."""
        return 1e3 * statistics.median(self._host) if self._host else None

    def device_ms(self) -> float | None:
        """Return the median time from the begin of a step on a GPU to its end, in ms, waiting for the last one."""
        if not self._events:
            return None
        self._events[-1][1].synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in self._events)

"""Kernels of a trace that `jax.profiler` wrote."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from benchmarks.harness.kernel_groups import Kernel

DEVICE, STREAM, OPERATION = "/device:GPU", "Stream", "hlo_op"


def kernels_of(folder: Path, steps: int) -> list[Kernel]:
    """Return the kernels of the newest trace below a folder, with milliseconds and launches a step.

    On a CPU the operations of XLA's program stand for kernels, with the time of all threads.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    ms, launches = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in _events(ProfileData.from_file(str(newest))):
        ms[event.name] += event.duration_ns / 1e6 / steps
        launches[event.name] += 1 / steps
    return [(name, ms[name], launches[name]) for name in ms]


def _events(trace: Any) -> Iterator[Any]:
    planes = [plane for plane in trace.planes if plane.name.startswith(DEVICE)]
    for plane in planes or trace.planes:
        for line in plane.lines:
            if not planes:
                yield from (event for event in line.events if any(name == OPERATION for name, _ in event.stats))
            elif line.name.startswith(STREAM):
                yield from line.events

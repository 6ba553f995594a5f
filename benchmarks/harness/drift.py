"""Drift of a process over hours: what it holds, and the line through those numbers."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

# Share of the samples before the line: what warms up is no drift.
WARM = 0.2


def held() -> dict[str, float]:
    """Return what this process holds: bytes of memory, open descriptors, threads and Python threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
        "python_threads": float(threading.active_count()),
    }


def drifts(hours: Sequence[float], series: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Fit a line through each series after its first `WARM` share, by least squares.

    Returns:
        By name: the `first` and `last` value, the slope `per_hour`, and `growth`, by how much of its mean the line
        rises from its beginning to its end. Zero for fewer than two samples.

    """
    start = min(int(np.ceil(WARM * len(hours))), max(0, len(hours) - 2))
    at = np.asarray(hours[start:], float)
    found = {}
    for name, values in series.items():
        kept = np.asarray(values[start:], float)
        slope = float(np.polyfit(at, kept, 1)[0]) if len(at) > 1 and np.ptp(at) > 0 else 0.0
        growth = slope * float(np.ptp(at)) / float(kept.mean()) if kept.mean() else 0.0
        found[name] = {"first": float(kept[0]), "last": float(kept[-1]), "per_hour": slope, "growth": growth}
    return found

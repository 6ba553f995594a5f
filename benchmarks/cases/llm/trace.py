"""What a GPU does meanwhile: its kernels by name, and the share of time in which none runs, from JAX's own profiler."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

DEVICE, STREAM = "/device:GPU", "Stream"


class Span(NamedTuple):
    """A kernel or copy, in nanoseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """A GPU's time between its first and its last kernel."""

    wall_ms: float  # from the one to the other
    busy_ms: float  # in which at least one ran
    kernels: dict[str, tuple[int, float]]  # times they ran and milliseconds in all, longest first

    @property
    def idle(self) -> float:
        """Share of the time in which none ran."""
        return 1 - self.busy_ms / self.wall_ms

    def to_dict(self, most: int = 12) -> dict[str, Any]:
        """JSON-serialisable, with the longest kernels."""
        longest = [{"name": name, "count": n, "ms": ms} for name, (n, ms) in list(self.kernels.items())[:most]]
        return {"wall_ms": self.wall_ms, "busy_ms": self.busy_ms, "idle": self.idle, "kernels": longest}


def traced(call: Callable[[], object]) -> Trace | None:
    """Run it under the profiler; None where no GPU did anything."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = spans(ProfileData.from_file(str(file)).planes)
    return trace_of(found) if found else None


def spans(planes: Iterable[Any]) -> list[Span]:
    """What ran on streams of GPUs; other lines of their planes say the same again."""
    lines = (line for plane in planes if plane.name.startswith(DEVICE) for line in plane.lines)
    events = (event for line in lines if line.name.startswith(STREAM) for event in line.events)
    return [Span(event.name, event.start_ns, event.start_ns + event.duration_ns) for event in events]


def trace_of(found: list[Span]) -> Trace:
    """Sum them up; what runs at the same time counts once."""
    ordered = sorted(found, key=lambda span: span.start)
    busy, until = 0.0, ordered[0].start
    kernels: dict[str, tuple[int, float]] = {}
    for span in ordered:
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
        count, ms = kernels.get(span.name, (0, 0.0))
        kernels[span.name] = count + 1, ms + (span.end - span.start) / 1e6
    longest = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return Trace((until - ordered[0].start) / 1e6, busy / 1e6, longest)

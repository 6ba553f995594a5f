"""Timing for the benchmarks of `fullstride.jvp`: on a GPU in captured graphs, which exclude host time."""

from dataclasses import replace

import torch

from fullstride.device.cuda_graph import CudaGraph
from fullstride.measure.timing import Call, Clock, Timing, TimingPlan, measure

PLAN = TimingPlan(warmup=1, repeats=5, seconds=0.15, most=50)
# A call that takes this long tells what it takes in fewer: its spread is small.
SLOW, SLOW_MS = TimingPlan(warmup=0, repeats=3, seconds=0.0), 300.0
# The host keeps ahead of a call that takes longer, and a graph would keep the call's memory once more.
GRAPH_MS = 20.0
# A graph should take about this long by the floor, that the start of its replay does not count.
REPLAY_MS, MOST_CALLS = 0.5, 16


def timed(calls: list[Call], clock: Clock, device: torch.device, floor_ms: float) -> tuple[Timing, int]:
    """Times of one call, as a mean over all of them in turn, and how many were in a graph: 0 without one.

    The calls are the same one on separate inputs, the first of which has run before. Short ones are repeated in a
    graph, as often as their roofline bound `floor_ms` says.
    """
    ms = clock.time(calls[0])
    if device.type == "cuda" and ms > GRAPH_MS:  # or the host was at something else
        ms = min(ms, *(clock.time(calls[0]) for _ in range(2)))
    if device.type != "cuda" or ms > GRAPH_MS:
        return _mean(_in_turn(calls), clock, SLOW if ms * len(calls) > SLOW_MS else PLAN, len(calls)), 0
    every = calls * max(1, min(int(REPLAY_MS / floor_ms), MOST_CALLS) // len(calls))
    try:
        replay = CudaGraph(_in_turn(every), None).replay
    except RuntimeError:  # synchronises, or takes too much memory twice
        return _mean(_in_turn(calls), clock, PLAN, len(calls)), 0
    return _mean(replay, clock, PLAN, len(every)), len(every)


def _in_turn(calls: list[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _mean(call: Call, clock: Clock, plan: TimingPlan, count: int) -> Timing:
    timing = measure(call, clock, plan)
    return replace(timing, samples_ms=tuple(ms / count for ms in timing.samples_ms))


def sets_beyond(cache: int, moved: int, most: int = 16) -> int:
    """Return how many sets of tensors to rotate so that the cache holds none when its turn comes."""
    return min(most, 1 + -(-2 * cache // moved))


class Copies:
    """Times of copies of equal size, rotating over as many buffers, measured like the calls they are compared with."""

    def __init__(self, clock: Clock, device: torch.device):
        self.clock, self.device, self.found = clock, device, dict[tuple[int, int], float]()

    def ms(self, moved: int, sets: int) -> float:
        """Return the median milliseconds of a copy that reads and writes `moved` bytes together."""
        if (moved, sets) not in self.found:
            calls = [self._call(moved // 2) for _ in range(sets)]
            calls[0]()
            self.found[moved, sets] = timed(calls, self.clock, self.device, 1.0)[0].median_ms
        return self.found[moved, sets]

    def _call(self, size: int) -> Call:
        target, source = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return lambda: target.copy_(source)

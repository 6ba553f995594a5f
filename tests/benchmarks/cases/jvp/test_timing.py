import time

import torch

from benchmarks.cases.jvp import timing as bench_timing
from benchmarks.cases.jvp.timing import Copies, sets_beyond, timed
from fullstride.measure.timing import HostClock, Timing, TimingPlan

CPU = torch.device("cpu")


class Told(HostClock):
    """Clock that advances as calls tell it."""

    now = 0.0

    def time(self, call):
        start = self.now
        call()
        return self.now - start

    def takes(self, ms):
        def call():
            self.now += ms

        return call


def test_a_processor_has_no_graph_and_calls_are_timed_as_a_mean(monkeypatch):
    monkeypatch.setattr(bench_timing, "PLAN", TimingPlan(warmup=0, repeats=2, seconds=0.0))
    clock = Told()
    timing, graphed = timed([clock.takes(2.0), clock.takes(6.0)], clock, CPU, 1.0)
    assert graphed == 0
    assert timing.samples_ms == (4.0, 4.0)


def test_what_is_slow_is_repeated_less(monkeypatch):
    monkeypatch.setattr(bench_timing, "SLOW_MS", 0.5)
    calls = []
    timed([lambda: calls.append(time.sleep(0.001))], HostClock(), CPU, 1.0)
    assert len(calls) == 5  # to see how long it takes, measure's first, three samples


class OnceLate(HostClock):
    """Clock of a host that is busy during the first call."""

    count = 0

    def time(self, call):
        call()
        self.count += 1
        return 50.0 if self.count == 1 else 0.25


class Recorded:
    def __init__(self, call, _):
        self.replay = call


def test_a_first_call_that_waits_for_the_host_keeps_no_short_one_from_its_graph(monkeypatch):
    monkeypatch.setattr(bench_timing, "CudaGraph", Recorded)
    monkeypatch.setattr(bench_timing, "measure", lambda call, clock, plan: Timing(0.0, (clock.time(call),), None))
    timing, graphed = timed([lambda: None] * 2, OnceLate(), torch.device("cuda"), 0.25)
    assert graphed == 2
    assert timing.median_ms == 0.125


def test_sets_overflow_the_cache():
    for cache, moved in ((0, 10), (100, 10), (100, 30), (100, 1000)):
        n = sets_beyond(cache, moved, most=1000)
        assert (n - 1) * moved >= 2 * cache
        assert n == 1 or (n - 2) * moved < 2 * cache
    assert sets_beyond(10**9, 1, most=16) == 16


def test_copies_are_measured_once():
    copies = Copies(HostClock(), CPU)
    ms = copies.ms(1 << 20, 2)
    assert ms > 0
    assert copies.ms(1 << 20, 2) == ms
    assert set(copies.found) == {(1 << 20, 2)}

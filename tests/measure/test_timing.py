import time

import numpy as np
import pytest
import torch

from fullstride.measure.timing import HostClock, Timing, TimingPlan, clock_for, measure
from tests.measure.clocks import FakeClock


@pytest.mark.parametrize("n", [1, 2, 3, 10, 17])
def test_quantiles_match_numpy(n, seed):
    samples = np.random.default_rng(seed).lognormal(size=n)
    timing = Timing(0.0, tuple(samples.tolist()), None)
    for q in (0.0, 0.1, 0.37, 0.5, 0.9, 1.0):
        assert timing.quantile(q) == pytest.approx(np.quantile(samples, q), rel=1e-12)
    assert timing.median_ms == pytest.approx(np.median(samples), rel=1e-12)


def test_first_call_and_warm_up_stay_out_of_the_samples():
    clock = FakeClock()
    step = clock.function("a", [5000.0, 70.0, 60.0, 3.0, 1.0, 2.0])
    timing = measure(step, clock, TimingPlan(warmup=2, repeats=3, seconds=0.0))
    assert timing.first_ms == 5000.0
    assert timing.samples_ms == (3.0, 1.0, 2.0)
    assert timing.median_ms == 2.0
    assert clock.calls == ["a"] * 6


@pytest.mark.parametrize(
    ("cost", "plan", "expected"),
    [
        (5000.0, TimingPlan(warmup=0, repeats=3, seconds=1.0, most=200), 3),
        (100.0, TimingPlan(warmup=0, repeats=3, seconds=1.0, most=200), 10),
        (1.0, TimingPlan(warmup=0, repeats=3, seconds=1.0, most=200), 200),
        (1.0, TimingPlan(warmup=0, repeats=7, seconds=0.0, most=200), 7),
        (1.0, TimingPlan(warmup=0, repeats=9, seconds=1.0, most=4), 9),
    ],
    ids=["slow", "by the time", "by the count", "fixed", "at least repeats"],
)
def test_one_plan_serves_slow_and_fast_functions(cost, plan, expected):
    clock = FakeClock()
    assert len(measure(clock.function("a", [cost]), clock, plan).samples_ms) == expected


def test_peak_memory_of_the_timed_calls_is_reported():
    clock = FakeClock()
    step = clock.function("a", [1.0], peaks=[1, 1, 7, 3])
    assert measure(step, clock, TimingPlan(warmup=1, repeats=2, seconds=0.0)).peak_bytes == 7


def test_summary_and_raw_samples_are_kept():
    timing = Timing(9.0, (3.0, 1.0, 2.0), 5)
    assert timing.to_dict() == {
        "first_ms": 9.0,
        "samples_ms": [3.0, 1.0, 2.0],
        "peak_bytes": 5,
        "median_ms": 2.0,
        "p10_ms": pytest.approx(1.2),
        "p90_ms": pytest.approx(2.8),
    }


def test_the_host_clock_waits_for_the_device_before_and_after(monkeypatch):
    now, events = [0.0], []

    def synchronize() -> None:
        events.append("wait")
        now[0] += 0.25

    def call() -> None:
        events.append("call")
        now[0] += 0.5

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    # The wait before the call is not the call's; the one after it is.
    assert HostClock(synchronize).time(call) == 750.0
    assert events == ["wait", "call", "wait"]


def test_the_cpu_is_timed_by_the_host():
    clock = clock_for("cpu")
    assert isinstance(clock, HostClock)
    x = torch.randn(33, 33)
    timing = measure(lambda: x @ x, clock, TimingPlan(warmup=1, repeats=5, seconds=0.0))
    assert len(timing.samples_ms) == 5
    assert min(timing.first_ms, *timing.samples_ms) > 0
    assert timing.peak_bytes is None


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "CPU"])
def test_a_device_without_clock_is_refused(device):
    # The host's clock would time the launches on it, and nothing would look wrong.
    with pytest.raises(ValueError, match=f"device={device}: expected one of .*cuda"):
        clock_for(device)


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 3), (-1, 3), (10, -1)])
def test_a_plan_that_times_nothing_is_refused(repeats, warmup):
    with pytest.raises(ValueError, match=f"repeats is {repeats} and warmup {warmup}; expected repeats >= 1"):
        TimingPlan(repeats=repeats, warmup=warmup)

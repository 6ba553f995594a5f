import time

import pytest

from fullstride.step.jax import Pace, TrainStep
from fullstride.step.jax.step_timing import Stopwatch
from tests.step.jax.nets import Net, adam, batch_of, run, squared


@pytest.mark.parametrize(
    ("pace", "text"),
    [
        (Pace(9, 1.84, 15.93, 1.0), "host 1.8 of 15.9 ms, hidden"),
        (Pace(9, 12.0, 12.9, 0.0), "host 12.0 of 12.9 ms, exposed"),
        (Pace(9, 1.0, 2.0, 0.75), "host 1.0 of 2.0 ms, hidden in 75% of steps"),
        (Pace(9, 1.0, 2.0, 0.25), "host 1.0 of 2.0 ms, exposed in 75% of steps"),
        (Pace(0, 0.0, 0.0, 0.0), "host: no steps yet"),
    ],
)
def test_a_report_is_one_line(pace, text):
    assert str(pace) == text


def test_laps_are_medians_and_compiling_ones_do_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    # Calls begin at these times, in seconds, and come back after these many; the first one compiles.
    for start, host, busy in [(0.0, 50.0, False), (60.0, 0.001, False), (60.010, 0.003, True), (60.030, 0.002, True)]:
        now[0] = start + host
        watch.lap(start, busy, counts=host < 1)
    pace = watch.report()
    assert pace.steps == 3
    assert pace.host_ms == pytest.approx(2.0)
    assert pace.total_ms == pytest.approx(15.0)
    assert pace.hidden == 1.0
    assert watch.report().steps == 0


def test_a_step_reports_what_it_took_since_the_last_report():
    step = TrainStep(squared, adam(), Net(0))
    state, _ = run(step, [batch_of(i) for i in range(4)])
    pace = step.report()
    assert pace.steps == 3
    assert pace.host_ms > 0
    run(step, [batch_of(0)] * 2, state=state)
    assert step.report().steps == 2

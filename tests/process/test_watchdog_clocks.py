import random

import pytest

from fullstride.process.watchdog import Verdict, WatchdogClocks, WatchdogLimits, span

FIRST = "the first step"


def run(clocks: WatchdogClocks, seconds: float, steps: range, each: float, busy: bool | None = None) -> Verdict | None:
    """Let time pass in pieces of `seconds` while a step is made every `each`; the first verdict, if any."""
    passed = 0.0
    while passed < each * len(steps):
        passed += seconds
        if verdict := clocks.pass_time(seconds, steps[min(int(passed / each), len(steps) - 1)], busy):
            return verdict
    return None


def test_the_first_step_has_a_limit_of_its_own():
    clocks = WatchdogClocks(WatchdogLimits(first_step=100.0, step=3.0), step=7)
    assert clocks.pass_time(99.0, 7, None) is None
    assert clocks.pass_time(1.0, 7, None) == Verdict("no_step", "no progress for 100 s, waiting for the first step")
    clocks = WatchdogClocks(WatchdogLimits(first_step=100.0, step=3.0), step=7)
    clocks.pass_time(99.0, 7, None)
    clocks.train()
    assert clocks.pass_time(2.0, 7, None) is None
    assert clocks.pass_time(2.0, 8, None) is None
    verdict = clocks.pass_time(3.0, 8, None)
    assert verdict == Verdict("no_step", "no progress for 3 s, waiting for step 9")


def test_what_is_waited_for_has_its_own_limit_and_then_steps_begin_anew():
    clocks = WatchdogClocks(WatchdogLimits(step=3.0, evaluation=50.0), step=0)
    clocks.train()
    clocks.pass_time(2.0, 0, None)
    clocks.wait_for("an evaluation", 50.0)
    assert clocks.pass_time(49.0, 0, False) is None
    clocks.train()
    assert clocks.pass_time(2.0, 0, None) is None
    clocks.wait_for("an evaluation", 0.0)
    assert clocks.pass_time(1e6, 0, None) is None
    clocks.wait_for("an evaluation", 50.0)
    assert "waiting for an evaluation" in str(clocks.pass_time(50.0, 0, None))


def test_an_idle_gpu_counts_only_between_steps_and_only_if_it_is_known():
    clocks = WatchdogClocks(WatchdogLimits(gpu_idle=10.0), step=0)
    assert clocks.pass_time(30.0, 0, False) is None
    clocks.train()
    assert all(clocks.pass_time(6.0, 0, busy) is None for busy in (False, True, False, None, False))
    verdict = clocks.pass_time(6.0, 0, False)
    assert verdict == Verdict("gpu_idle", "nothing ran on the GPU for 10 s, at step 1")


@pytest.mark.parametrize("seed", range(5))
def test_a_checkpoint_is_overdue_after_twice_its_time_and_missing_after_four_times(seed):
    draw = random.Random(seed)
    each, ahead = draw.uniform(0.5, 5.0), draw.randint(20, 60)
    limits = WatchdogLimits(checkpoint_factor=2.0)
    clocks = WatchdogClocks(limits, step=0)
    clocks.expect_checkpoint(ahead)
    clocks.train()
    quarter = range(ahead // 4 + 2)
    assert run(clocks, 0.1, quarter, each) is None
    # From here on a step takes four times as long.
    slow = range(quarter[-1], ahead + 1)
    while not clocks.overdue:
        assert clocks.pass_time(0.1, slow[0], None) is None
    assert 1.9 * each * ahead < clocks._unsaved < 2.2 * each * (ahead + 4)
    verdict = run(clocks, 0.1, slow, 8 * each)
    assert verdict is not None
    assert verdict.reason == "no_checkpoint"
    assert 3.8 * each * ahead < clocks._unsaved < 4.4 * each * (ahead + 4)


def test_a_run_that_became_slower_saves_early_a_few_times_and_is_never_ended():
    clocks, saves = WatchdogClocks(WatchdogLimits(checkpoint_factor=2.0), step=0), 0
    clocks.expect_checkpoint(400)
    clocks.train()
    assert run(clocks, 0.1, range(101), 1.0) is None
    for step in range(101, 400):
        assert run(clocks, 0.1, range(step, step + 1), 8.0) is None
        if clocks.overdue:
            clocks.expect_checkpoint(400 - step)
            saves += 1
    assert 1 <= saves <= 3


def test_the_slowest_interval_is_what_later_ones_are_expected_to_take():
    clocks = WatchdogClocks(WatchdogLimits(checkpoint_factor=2.0), step=0)
    clocks.expect_checkpoint(10)
    clocks.train()
    start = 0
    for each in (1.0, 3.9, 15.0, 1.0, 58.0):
        assert run(clocks, 0.1, range(start, start + 11), each) is None, each
        start += 10
        clocks.expect_checkpoint(10)
    assert run(clocks, 0.1, range(start, start + 11), 240.0) is not None


def test_neither_evaluations_nor_the_first_moments_are_late_checkpoints():
    clocks = WatchdogClocks(WatchdogLimits(checkpoint_factor=2.0, checkpoint_least=60.0), step=0)
    clocks.expect_checkpoint(4)
    clocks.pass_time(1000.0, 0, None)
    clocks.train()
    assert run(clocks, 0.1, range(3), 1.0) is None
    clocks.wait_for("an evaluation", 0.0)
    assert clocks.pass_time(1000.0, 2, None) is None
    clocks.train()
    assert clocks.pass_time(56.0, 2, None) is None
    assert not clocks.overdue
    assert clocks.pass_time(60.0, 2, None) is None
    assert clocks.overdue
    late = clocks.pass_time(3.0, 2, None)
    assert late is not None
    assert late.reason == "no_checkpoint"


def test_without_limits_nothing_ends():
    clocks = WatchdogClocks(WatchdogLimits(), step=0)
    clocks.expect_checkpoint(3)
    clocks.train()
    assert clocks.pass_time(1e9, 0, False) is None


def test_steps_that_are_taken_back_are_progress():
    clocks = WatchdogClocks(WatchdogLimits(step=3.0), step=9)
    clocks.train()
    clocks.pass_time(2.0, 9, None)
    assert clocks.pass_time(2.0, 4, None) is None
    assert clocks.pass_time(2.0, 4, None) is None


def test_times_for_people():
    assert [span(x) for x in (0.5, 119.0, 120.0, 2700.0)] == ["0.5 s", "119 s", "2 min", "45 min"]

import time

from fullstride.bench.session import Budget
from fullstride.meanflow import bench_step_workers
from fullstride.meanflow.bench_step_workers import Job, run_jobs
from tests.meanflow.quick_bench import bench


def test_cases_are_run_in_processes_of_their_own_which_take_turns(capfd):
    jobs = [Job("ratios", name, None, ("eager",), True) for name in ("FM MSE", "no such case", "MeanFlow 100%")]
    own = bench(batch_size=4)
    run_jobs(own, jobs, 3)
    assert [row.name for row in own.rows] == ["FM MSE, eager", "MeanFlow 100%, eager"]
    assert all(0 < max(row.extra["errors"].values()) < 1e-4 and row.timing.median_ms > 0 for row in own.rows)
    assert own.rows[0].floor.ms == own.setup.floor(3.0, 3.0, 4).ms
    (missing,) = own.left_out
    assert (missing.name, missing.why, missing.wrong) == ("no such case", "its process ended with exit code 1", True)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("gate", "timing"))]
    assert [line.split(":")[0] for line in said] == ["gate", "gate", "timing", "timing"]


def test_after_the_time_no_process_is_begun():
    own = bench(batch_size=4)
    own.setup.__dict__["budget"] = Budget.of(0.0)
    run_jobs(own, [Job("ratios", "FM MSE", None, ("compile", "compile+graph"), True)], 2)
    assert [(e.backend, e.why) for e in own.left_out] == [("compile", "no time"), ("compile+graph", "no time")]


def _mute(parent, *given):
    """A worker that hangs."""
    time.sleep(600)


def test_a_process_that_hangs_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(bench_step_workers, "work", _mute)
    monkeypatch.setattr(bench_step_workers, "HANGING", 0.0)
    own = bench(batch_size=4)
    own.setup.__dict__["budget"] = Budget.of(1.0)
    start = time.monotonic()
    run_jobs(own, [Job("ratios", "FM MSE", None, ("eager",), True)], 1)
    assert [(e.name, e.why) for e in own.left_out] == [("FM MSE", "no time")]
    assert time.monotonic() - start < 60

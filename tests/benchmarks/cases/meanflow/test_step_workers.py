import time

import pytest

from benchmarks.cases.meanflow import step as bench_step_workers
from benchmarks.cases.meanflow.step import StepJob, run_jobs
from benchmarks.harness import process_pool
from benchmarks.harness.budget import Budget
from benchmarks.harness.process_pool import Worker
from tests.benchmarks.cases.meanflow.quick_bench import bench


@pytest.mark.thorough
def test_cases_are_run_in_processes_of_their_own_which_take_turns(capfd):
    jobs = [StepJob("ratios", name, None, ("eager",), True) for name in ("FM MSE", "no such case", "MeanFlow 100%")]
    own = bench(batch_size=4)
    run_jobs(own, jobs, 3)
    assert [row.name for row in own.rows] == ["FM MSE, eager", "MeanFlow 100%, eager"]
    assert all(0 < max(row.extra["errors"].values()) < 1e-4 and row.timing.median_ms > 0 for row in own.rows)
    assert own.rows[0].floor.ms == own.setup.floor(3.0, 3.0, 4).ms
    (missing,) = own.left_out
    assert (missing.name, missing.why, missing.wrong) == ("no such case", "StopIteration: StopIteration", True)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("gate", "timing"))]
    assert [line.split(":")[0] for line in said] == ["gate", "gate", "timing", "timing"]


def test_after_the_time_no_process_is_begun():
    own = bench(batch_size=4)
    own.setup.__dict__["budget"] = Budget.of(0.0)
    run_jobs(own, [StepJob("ratios", "FM MSE", None, ("compile", "compile+graph"), True)], 2)
    assert [(e.backend, e.why) for e in own.left_out] == [("compile", "no time"), ("compile+graph", "no time")]


real_work, speaking = bench_step_workers.work, process_pool.speaking


def _mute(parent, beside, options, job, *given):
    """Run a worker that hangs at one of the cases."""
    if job.name == "FM MSE":
        time.sleep(600)
    real_work(parent, beside, options, job, *given)


def test_a_process_that_hangs_is_ended_and_the_others_have_their_turns(monkeypatch):
    hanging: list[Worker] = []

    def impatient(workers, until):
        hanging[:] = hanging or workers
        return [] if workers == hanging else speaking(workers, until)

    monkeypatch.setattr(bench_step_workers, "work", _mute)
    monkeypatch.setattr(process_pool, "speaking", impatient)
    own = bench(batch_size=4)
    run_jobs(own, [StepJob("ratios", name, None, ("eager",), True) for name in ("FM MSE", "MeanFlow 100%")], 2)
    assert [(e.name, e.why) for e in own.left_out] == [("FM MSE", "no time")]
    assert [row.name for row in own.rows] == ["MeanFlow 100%, eager"]
    assert not hanging[0].process.is_alive()

import json
import os
import signal
from pathlib import Path

import pytest

from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError, OutOfMemory, Preempted, ReadError
from fullstride.runs.early_ends import write_end
from fullstride.runs.folder import MetricsLog, write_config
from fullstride.runs.lock import hold, holder, release
from fullstride.runs.state import STATE, record_state
from fullstride.runs.survey import KILLED, remove_run, runs_in, summary


def run_at(folder: Path, step: int = 7) -> Path:
    """A run that has made some steps."""
    folder.mkdir(parents=True)
    write_config(folder, TrainSettings(run_name=folder.name))
    log = MetricsLog(folder, 0)
    log.write(step, loss=0.25, lr=0.5)
    log.write(step, evaluation={"masked_loss": 2.0})
    return folder


def end(run: Path, error: BaseException | None = None) -> None:
    with pytest.raises(type(error)) if error else record_state(run, steps=9, made=lambda: 7):
        if error:
            with record_state(run, steps=9, made=lambda: 7):
                raise error


class Held:
    """Another process that holds a run, until it is ended."""

    def __init__(self, run: Path):
        ready, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            hold(run)
            os.write(told, b"1")
            signal.pause()
        os.read(ready, 1)

    def __enter__(self) -> int:
        return self.pid

    def __exit__(self, *error: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (None, "finished", 0),
        (Preempted("stopped; saved"), "stopped", 0),
        (KeyboardInterrupt("stopped; saved"), "stopped", 130),
        (ConfigError("a setting"), "failed", 2),
        (OutOfMemory("too large"), "failed", 12),
        (MemoryError("too large"), "failed", 12),
        (ReadError("no disk"), "failed", 74),
        (FloatingPointError("no\nnumber"), "failed", 1),
        (AssertionError(), "failed", 1),
    ],
)
def test_a_run_says_how_it_ended(tmp_path, error, state, code):
    end(run_at(tmp_path / "run"), error)
    found = summary(tmp_path / "run")
    assert (found.state, found.exit_code, found.step, found.steps) == (state, code, 7, 9)
    assert found.why == ("" if error is None else " ".join(str(error).split()) or "AssertionError")
    assert found.metrics == {"step": 7, "loss": 0.25, "lr": 0.5}
    assert found.evaluation == {"masked_loss": 2.0}
    assert found.workload == "bert"
    assert found.size == sum(path.stat().st_size for path in (tmp_path / "run").iterdir())


def test_a_run_is_running_while_its_process_holds_it_and_was_killed_if_none_does(tmp_path):
    run = run_at(tmp_path / "run")
    with record_state(run, steps=9, made=lambda: 7):
        with Held(run) as pid:
            assert [holder(run), holder(run)] == [pid, pid]  # to look is not to take
            assert summary(run).state == "running"
            with pytest.raises(ConfigError, match="another process is training this run"):
                remove_run(run)
        assert holder(run) is None
        assert (summary(run).state, summary(run).why, summary(run).exit_code) == ("failed", KILLED, None)
        hold(run)
        assert holder(run) == os.getpid()
        release(run)
    assert summary(run).state == "finished"


def test_a_watchdogs_reason_counts_for_the_attempt_that_it_ended(tmp_path):
    run = run_at(tmp_path / "run")
    write_end(run, reason="gpu_idle", message="was idle", step=3, exit_code=75)
    kept = {"state": "running", "step": 0, "steps": 9, "began": os.stat(run / "ends.jsonl").st_mtime - 60}
    (run / STATE).write_text(json.dumps(kept))
    found = summary(run)
    assert (found.state, found.why, found.exit_code) == ("failed", "gpu_idle: was idle", 75)
    (run / STATE).write_text(json.dumps(kept | {"began": kept["began"] + 120}))  # resumed after that
    assert summary(run).why == KILLED


def test_damaged_and_older_runs_are_unknown_not_an_error(tmp_path):
    run = run_at(tmp_path / "run")
    assert summary(run).state == "unknown"
    (run / STATE).write_text('{"state": "fin')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": \n[1]\n{"loss": 3}\n')
    assert (summary(run).state, summary(run).step) == ("unknown", 7)
    (run / "metrics.jsonl").unlink()
    assert (summary(run).step, summary(run).metrics) == (0, {})


def test_runs_are_found_at_any_depth_and_weights_are_none(tmp_path):
    runs = [run_at(tmp_path / name) for name in ("a", "sweep/b", "sweep/c")]
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "bert"}')
    assert runs_in([tmp_path, tmp_path / "a"]) == runs
    with pytest.raises(ConfigError, match="no such folder"):
        runs_in([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="holds no run, and is left as it is"):
        remove_run(tmp_path / "weights")
    (tmp_path / "link").symlink_to(runs[0])
    remove_run(tmp_path / "link")
    assert runs_in([tmp_path]) == runs[1:]
    assert not (tmp_path / "link").is_symlink()

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullstride.process.watchdog import Verdict, Watchdog, WatchdogLimits
from fullstride.runs.early_ends import read_ends

STUCK = """
import ctypes, sys, threading, time
from pathlib import Path
from fullstride.runs.early_ends import write_end
from fullstride.process.watchdog import Watchdog, WatchdogLimits

run, limits = Path(sys.argv[1]), WatchdogLimits(**eval(sys.argv[2]))
steps = 0

def tell(verdict, step):
    write_end(run, reason=verdict.reason, message=verdict.message, step=step, exit_code=75)

def the_step_that_hangs():
    {stuck}

with Watchdog(limits, lambda: steps, tell, lambda: {busy}) as watchdog:
    watchdog.expect_checkpoint(12)
    watchdog.train()
    for steps in range(1, 7):
        time.sleep(0.05)
    the_step_that_hangs()
print("went on")
"""


def stuck(folder: Path, limits: dict, stuck: str, busy: str = "None") -> subprocess.CompletedProcess[str]:
    """A process that makes six steps of 0.05 s and then hangs."""
    code = STUCK.format(stuck=stuck, busy=busy)
    command = [sys.executable, "-c", code, str(folder), repr(limits)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("limits", "call", "busy", "reason"),
    [
        ({"step": 0.5}, "time.sleep(60)", "None", "no_step"),
        ({"step": 0.5}, "lock = threading.Lock(); lock.acquire(); lock.acquire()", "None", "no_step"),
        ({"step": 30, "gpu_idle": 0.5}, "ctypes.CDLL(None).sleep(60)", "False", "gpu_idle"),
        ({"checkpoint_factor": 2, "checkpoint_least": 0.8}, "time.sleep(60)", "None", "no_checkpoint"),
    ],
)
def test_a_process_that_is_stuck_ends_with_the_reason_and_every_stack(tmp_path, limits, call, busy, reason):
    done = stuck(tmp_path, limits, call, busy)
    assert done.returncode == 75, done.stderr
    assert done.stdout == ""
    (end,) = read_ends(tmp_path)
    assert (end["reason"], end["step"], end["exit_code"], end["process"]) == (reason, 6, 75, 0)
    assert f"watchdog: {end['message']}; ending with exit code 75" in done.stderr
    assert "in the_step_that_hangs" in done.stderr


def test_a_call_that_keeps_pythons_lock_is_ended_too(tmp_path):
    done = stuck(tmp_path, {"step": 0.5}, "ctypes.PyDLL(None).sleep(60)")
    assert done.returncode == 1
    assert "in the_step_that_hangs" in done.stderr
    assert done.stdout == ""


def test_a_disk_that_hangs_does_not_keep_the_process(tmp_path):
    code = STUCK.format(stuck="time.sleep(60)", busy="None").replace("    write_end(", "    time.sleep(60); write_end(")
    code = code.replace("run, limits =", "import fullstride.process.watchdog as w; w.TELLING = 0.3\nrun, limits =")
    command = [sys.executable, "-c", code, str(tmp_path), repr({"step": 0.5})]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 75
    assert read_ends(tmp_path) == []


def test_a_step_that_takes_long_is_shown_once_and_goes_on(tmp_path):
    done = stuck(tmp_path, {"shown": 0.3, "step": 30}, "time.sleep(1.0)")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.count("no progress for 0.3 s, waiting for step 7; stacks of all threads:") == 1
    assert "in the_step_that_hangs" in done.stderr
    assert read_ends(tmp_path) == []


def test_a_suspended_process_was_not_idle(tmp_path):
    code = STUCK.format(stuck="time.sleep(1.2)", busy="None").replace("range(1, 7)", "range(1, 41)")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), repr({"step": 2.0})], stdout=subprocess.PIPE)
    time.sleep(0.8)
    child.send_signal(19)
    time.sleep(2.5)
    child.send_signal(18)
    assert child.communicate(timeout=60)[0] == b"went on\n"
    assert child.returncode == 0


def _no_end(verdict: Verdict, step: int) -> None:
    pytest.fail(f"{verdict} at {step}")


def test_steps_that_keep_coming_and_no_limits_are_silent(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stderr)
    made = iter(range(10_000))
    with Watchdog(WatchdogLimits(shown=0.2), lambda: next(made), _no_end):
        time.sleep(0.5)
    asked: list[int] = []
    with Watchdog(WatchdogLimits(), lambda: len(asked), _no_end, busy=lambda: asked.append(1)):
        time.sleep(0.05)
    assert stderr.getvalue() == ""
    assert asked == []

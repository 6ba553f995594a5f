import io
import subprocess
import sys
import time

from fullstride.meanflow.watchdog import Watchdog

HANG = """
import time
from fullstride.meanflow.watchdog import Watchdog

def the_step_that_hangs():
    time.sleep(1.0)

with Watchdog(0.2) as watchdog:
    watchdog.heard("step 7")
    the_step_that_hangs()
"""


def test_a_step_that_hangs_is_shown_once_with_its_stack():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("no progress for 0.2 s, waiting for step 7; every thread is here:") == 1
    assert "in the_step_that_hangs" in done.stderr


def test_steps_that_keep_coming_and_no_watch_are_silent(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stderr)
    with Watchdog(5.0) as watchdog:
        for step in range(3):
            watchdog.heard(f"step {step}")
    with Watchdog(0.0):
        time.sleep(0.01)
    assert stderr.getvalue() == ""

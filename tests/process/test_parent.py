import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullstride.process.parent import LAUNCHER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
# One that launches another, which writes down how it ended.
LAUNCHING = """
import sys, time
from fullstride.launch.attempts import Attempt
Attempt([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""
LAUNCHED = """
import os, signal, sys, time
from pathlib import Path
from fullstride.process.parent import LAUNCHER, end_with_launcher
def save(*_):
    Path(sys.argv[1], "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
end_with_launcher()
assert LAUNCHER not in os.environ
Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""
ALONE = "from fullstride.process.parent import end_with_launcher; end_with_launcher(); print('on')"


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_a_process_saves_and_ends_when_the_one_that_launched_it_is_killed(tmp_path):
    launching = subprocess.Popen([sys.executable, "-c", LAUNCHING, LAUNCHED, str(tmp_path)])
    wait_for(tmp_path / "ready")
    launching.send_signal(signal.SIGKILL)
    launching.wait()
    wait_for(tmp_path / "saved")


@pytest.mark.parametrize("launcher", ["", str(os.getpid()), "1"], ids=["none", "parent", "another"])
def test_it_goes_on_while_the_launcher_lives(launcher):
    given = os.environ | {LAUNCHER: launcher}
    assert subprocess.run([sys.executable, "-c", ALONE], env=given, capture_output=True, text=True).stdout == "on\n"


def test_nothing_begins_after_the_launcher_has_gone():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    given = os.environ | {LAUNCHER: str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", ALONE], env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "the launcher of this command has ended; nothing was started" in done.stderr

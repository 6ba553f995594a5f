import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullstride.launch.elastic import stopped

LINE = [
    sys.executable,
    "-m",
    "fullstride.launch.elastic",
    "--nproc-per-node=2",
    "--standalone",
    "--no-python",
    "sh",
    "-c",
]
# Processes as `fullstride` runs them: told to stop, they save and leave.
SAVES = 'exec 2>/dev/null; trap "exit 0" TERM; touch "$RECORD/$RANK"; while :; do sleep 0.1; done'


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({"0": 0, "1": 0}, 0, "SIGTERM: all 2 processes have ended with exit code 0"),
        ({"0": 0, "1": 12}, 12, "SIGTERM: rank 1 ended with exit code 12: out of memory"),
        ({"0": -9, "1": 0}, 137, "SIGTERM: rank 0 ended with exit code -9: killed (SIGKILL)"),
        ({"0": 0, "1": None}, 1, "SIGTERM: not all processes ended within 120 s"),
        ({}, 1, "SIGTERM: not all processes"),
    ],
)
def test_a_stop_ends_with_the_code_of_the_first_rank_that_failed(codes, code, said, capfd):
    assert stopped(signal.SIGTERM, codes) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"launch: {said}")


def test_torchrun_stops_and_fails_in_a_line_with_the_exit_code_of_its_processes(tmp_path):
    given = os.environ | {"RECORD": str(tmp_path), "OMP_NUM_THREADS": "1"}
    options = {"stderr": subprocess.PIPE, "text": True, "env": given}
    saves = subprocess.Popen([*LINE, SAVES], **options)
    fails = subprocess.Popen([*LINE, "sleep 0.$RANK; exit $((2 * (1 - $RANK)))"], **options)
    end = time.monotonic() + 60
    while len(list(Path(tmp_path).iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    saves.terminate()
    said = saves.communicate(timeout=60)[1]
    assert (saves.returncode, said) == (0, "launch: SIGTERM: all 2 processes have ended with exit code 0\n")
    said = fails.communicate(timeout=60)[1]
    assert fails.returncode == 2
    assert said.endswith("launch: rank 0 ended with exit code 2: an invalid setting\n")
    assert "Traceback" not in said

"""Derivatives of models that FSDP2 and DistributedDataParallel wrap."""

import os
import subprocess
import sys


def test_gradients_of_two_processes_are_those_of_one():
    launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    line = *launcher, "-m", "tests.jvp.two_processes"
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=given)
    assert done.returncode == 0, done.stderr

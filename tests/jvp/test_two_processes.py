"""Derivatives of models that FSDP2 and DistributedDataParallel wrap, and of attention whose rows are divided."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["two_processes", "two_processes_attention"])
def test_gradients_of_two_processes_are_those_of_one(module):
    launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    line = *launcher, "-m", f"tests.jvp.{module}"
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=given)
    assert done.returncode == 0, done.stderr

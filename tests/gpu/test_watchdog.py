"""A process whose GPU is stuck, or idle, ends: `python -m pytest tests/gpu`."""

import subprocess
import sys

import pytest
import torch

from fullstride.process.gpu_activity import utilization_probes
from fullstride.runs.early_ends import read_ends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STUCK = """
import sys, time
from pathlib import Path
import torch
from fullstride.runs.early_ends import write_end
from fullstride.process.gpu_activity import GpuActivity, utilization_probes
from fullstride.process.watchdog import Watchdog, WatchdogLimits

def tell(verdict, step):
    write_end(Path(sys.argv[1]), reason=verdict.reason, message=verdict.message, step=step, exit_code=75)

torch.cuda.synchronize()
with GpuActivity(utilization_probes(torch.device("cuda", 0)), every=0.2) as use:
    with Watchdog(WatchdogLimits({limits}), lambda: 3, tell, use.busy) as watchdog:
        watchdog.train()
        {stuck}
print("went on")
"""


def stuck(folder, limits: str, stuck: str) -> subprocess.CompletedProcess[str]:
    code = STUCK.format(limits=limits, stuck=stuck)
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)


def test_a_main_thread_that_waits_for_a_kernel_does_not_keep_the_process(tmp_path):
    # About a minute at 2 GHz, in pieces that a process can be ended between.
    kernels = "[torch.cuda._sleep(2_000_000_000) for _ in range(60)]; torch.cuda.synchronize()"
    done = stuck(tmp_path, "step=5.0, gpu_idle=4.0", kernels)
    assert done.returncode == 75, done.stderr
    assert [end["reason"] for end in read_ends(tmp_path)] == ["no_step"]


def test_an_idle_gpu_ends_the_process(tmp_path):
    done = stuck(tmp_path, "step=60.0, gpu_idle=5.0", "time.sleep(50)")
    assert done.returncode == 75, done.stderr
    assert [end["reason"] for end in read_ends(tmp_path)] == ["gpu_idle"]


def test_the_gpu_can_be_asked():
    answers = []
    for way in utilization_probes(torch.device("cuda", 0)):
        try:
            answers.append(way())
        except ModuleNotFoundError:  # torch's own way needs nvidia-ml-py
            continue
    assert answers
    assert all(0 <= answer <= 100 for answer in answers)

"""The predicted number of visible GPUs is the number that a process finds: `python -m pytest tests/gpu`."""

import subprocess
import sys

import pytest
import torch

from benchmarks.experiments.visible_gpus import gpus_of
from fullstride.launch.gpus import count_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNT = "import torch; print(torch.cuda.device_count())"


@pytest.mark.parametrize("visible", ["", "0", "99"])
def test_a_process_finds_as_many_as_pytorch_does(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, check=True).stdout
    assert count_gpus() == count_gpus(visible) == int(found) == (visible == "0")


def test_the_gpu_is_one_to_launch_on(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of("0") == ["0"]

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullstride.process.gpu_activity import GpuActivity, utilization_probes

CUDA = torch.device("cuda", 0)


def wait_for(use: GpuActivity, expected: bool | None) -> None:
    end = time.monotonic() + 10
    while use.busy() is not expected:
        assert time.monotonic() < end, use.busy()
        time.sleep(0.01)


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine whose GPU has an identity and nothing more."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="77aa-1"))
    monkeypatch.setattr(torch.cuda, "utilization", _missing)


def _missing(_: int) -> int:
    raise ModuleNotFoundError("pynvml does not seem to be installed or it can't be imported.")


def nvidia_smi(folder: Path, monkeypatch, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_nvidia_smi_is_asked_for_the_very_gpu(one_gpu, tmp_path, monkeypatch):
    answer = tmp_path / "answer"
    answer.write_text("37")
    asked = "assert sys.argv[-2:] == ['-i', 'GPU-77aa-1'], sys.argv\nassert '--query-gpu=utilization.gpu' in sys.argv"
    nvidia_smi(tmp_path, monkeypatch, f"{asked}\nprint(Path({str(answer)!r}).read_text())")
    with GpuActivity(utilization_probes(CUDA), every=0.02) as use:
        wait_for(use, True)
        answer.write_text("0")
        wait_for(use, False)


def test_the_driver_is_asked_first(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: 5 + index)
    with GpuActivity(utilization_probes(CUDA), every=0.02) as use:
        wait_for(use, True)


def test_where_nobody_can_be_asked_it_says_so_and_knows_nothing(one_gpu, tmp_path, monkeypatch, capfd):
    nvidia_smi(tmp_path, monkeypatch, "print('[N/A]')")
    with GpuActivity(utilization_probes(CUDA), every=0.02) as use:
        time.sleep(0.1)
        assert use.busy() is None
    assert capfd.readouterr().err.count("GPU activity is not watched") == 1
    GpuActivity([])
    assert capfd.readouterr().err == ""


def test_an_answer_that_stays_away_is_no_answer(monkeypatch):
    monkeypatch.setattr("fullstride.process.gpu_activity.STALE", 0.2)
    answers = iter([0, 0])

    def ask() -> int:
        if (answer := next(answers, None)) is not None:
            return answer
        time.sleep(1.0)
        return 0

    with GpuActivity([ask], every=0.01) as use:
        wait_for(use, False)
        wait_for(use, None)

import sys

import pytest
import torch

from fullstride.device.select import DEVICES, cores_each, describe, resolve_device, unavailable
from fullstride.errors import ConfigError, one_of


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine, and this torch, have a GPU or not."""

    def pretend(*, cuda=False, mps=False, cuda_built=True, mps_built=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda_built)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: mps_built)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_first_that_is_there(machine, cuda, mps, chosen):
    machine(cuda=cuda, mps=mps)
    assert resolve_device("auto") == torch.device(chosen)


def test_a_named_device_is_taken_whatever_else_is_there(machine):
    machine(cuda=True, mps=True)
    for name in ("cpu", "mps", "cuda"):
        assert resolve_device(name) == torch.device(name)
        assert unavailable(name) is None


@pytest.mark.parametrize(
    ("name", "built", "message"),
    [
        ("cuda", False, r"device=cuda: this torch \(.+\) is built without CUDA; install .* or use device=cpu"),
        ("cuda", True, "device=cuda: no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device=cpu"),
        ("mps", False, "device=mps: this torch is built without MPS, which is macOS's; use device=cpu"),
        ("mps", True, "device=mps: MPS needs a Mac with Apple silicon"),
    ],
)
def test_an_absent_device_raises_with_the_reason_and_the_remedy(machine, name, built, message):
    machine(cuda_built=built, mps_built=built)
    with pytest.raises(ConfigError, match=message):
        resolve_device(name)


def test_an_unknown_device_raises_with_the_nearest_name_first():
    with pytest.raises(ConfigError, match="device=cudda: expected one of cuda, .*did you mean cuda?"):
        resolve_device("cudda")
    with pytest.raises(ConfigError, match="expected one of") as raised:
        resolve_device("gpu")
    assert "did you mean" not in str(raised.value)
    assert all(name in str(raised.value) for name in DEVICES)


def test_a_device_is_described_with_the_name_of_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Some GPU of {device}")
    assert describe(torch.device("cuda")) == "cuda (Some GPU of cuda)"
    assert describe(torch.device("cpu")) == "cpu"


def test_without_torch_the_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        resolve_device("cpu")


def test_one_of_takes_every_name_and_refuses_the_rest():
    for name in ("a", "b"):
        one_of("key", name, ("a", "b"))
    with pytest.raises(ConfigError, match="^key=None: expected one of a, b$"):
        one_of("key", None, ("a", "b"))
    with pytest.raises(ConfigError, match="^key=x: expected a$"):
        one_of("key", "x", ("a",))


def test_ranks_of_one_machine_divide_its_cores(monkeypatch):
    monkeypatch.setattr("fullstride.device.select.cores", lambda: 12)
    for processes, share in (("1", 12), ("5", 2), ("12", 1), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert cores_each() == share
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cores_each() == 12

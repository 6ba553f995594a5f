"""Which processes write into each other's memory, before GPUs of ours."""

from typing import Any

import pytest
import torch

from fullstride import launched
from fullstride.errors import ConfigError
from fullstride.step.torch import joining
from fullstride.step.torch.peers import Peers
from fullstride.step.torch.processes import Processes


class Told(Processes):
    """The first of two processes, which hears what the other one would say."""

    def __init__(self, others: list[Any]):
        super().__init__()
        self.size, self.others, self.said = 2, others, []

    def gather(self, value):
        self.said.append(value)
        return [value, self.others.pop(0)]


@pytest.fixture
def machine(monkeypatch):
    """GPUs that reach each other; memory that is there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(joining.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(joining, "Symmetric", lambda *_: Silent())
    return monkeypatch


class Silent:
    """Memory that nobody asks for."""

    def allocate(self, count):
        raise AssertionError

    def meet(self):
        raise AssertionError


def peers(told: Told, transfers: str = "copies") -> Peers | None:
    group = torch.distributed.ProcessGroup(0, 2)  # pyright: ignore[reportCallIssue] # of rank and size, without a store
    return joining._peers(told, group, transfers)


def test_processes_of_one_machine_share_memory(machine):
    found = peers(Told([("here", 1), "", ""]))
    assert found is not None
    assert (found.rank, found.size) == (0, 2)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([("there", 1), ""], "several machines"),
        ([("here", 1), "GPU 1 cannot reach the memory of GPU 0"], "GPU 1 cannot reach the memory of GPU 0"),
        ([("here", 1), "", "no such call"], "no such call"),
    ],
)
def test_what_keeps_one_from_it_keeps_all_and_is_said(machine, capfd, others, reason):
    with pytest.raises(ConfigError, match=f"transfers=copies: .*{reason}"):
        peers(Told(list(others)))
    assert peers(Told(list(others)), "auto") is None
    assert reason in capfd.readouterr().err


def test_the_first_gpu_may_be_the_one_that_cannot_be_reached(machine):
    machine.setattr(torch.cuda, "current_device", lambda: 1)
    machine.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 0)
    assert joining._apart([("here", 0), ("here", 1)]) == "GPU 1 cannot reach the memory of GPU 0"
    machine.setattr(launched, "machines", lambda: 2)
    assert joining._apart([("here", 0)]) == "the processes are on several machines"


def test_memory_that_cannot_be_had_here_is_said(machine):
    def none(*_):
        raise RuntimeError("pidfd_getfd is not permitted\nand a trace")

    machine.setattr(joining, "Symmetric", none)
    told = Told([("here", 1), "", ""])
    with pytest.raises(ConfigError, match="transfers=copies: pidfd_getfd is not permitted; expected GPUs"):
        peers(told)
    assert told.said[-1] == "pidfd_getfd is not permitted"

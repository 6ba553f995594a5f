"""Which processes write into each other's memory, before GPUs of ours."""

import inspect
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.process import torchrun
from fullstride.step.torch.distributed import join as joining
from fullstride.step.torch.distributed.peer_copies import CannotShareError, PeerCopies, SymmetricMemory, atomics_reach
from fullstride.step.torch.distributed.processes import Processes


class Told(Processes):
    """The first of two processes, which hears what the other one would say."""

    def __init__(self, others: list[Any]):
        super().__init__()
        self.size, self.others, self.said = 2, others, []

    def gather(self, value):
        self.said.append(value)
        return [value, self.others.pop(0)]


class Handle:
    """Memory of two processes that have met, of which the other one's is never written."""

    rank, world_size = 0, 2

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def machine(monkeypatch):
    """GPUs that reach each other; memory that is there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda count, device: torch.full((count,), 1.0))
    monkeypatch.setattr(joining, "mean_of", lambda *_: None)
    monkeypatch.setattr(joining, "atomics_reach", lambda own, other: True)
    monkeypatch.setattr(joining.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(_symmetric_memory, "empty", lambda count, dtype, device: torch.empty(count, dtype=dtype))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda own, group: Handle())
    return monkeypatch


def peers(told: Told, transfers: str = "copies") -> PeerCopies | None:
    group = torch.distributed.ProcessGroup(0, 2)  # pyright: ignore[reportCallIssue] # of rank and size, without a store
    return joining._peers(told, group, transfers)


def failing(message: str, kind: type[Exception] = RuntimeError) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(message)

    return fail


# Where the other process is, then whether anything keeps it from sharing, whether it has memory and has met this one's.
OTHER = [("here", 1), "", "", ""]


@pytest.mark.parametrize("transfers", ["auto", "copies"])
def test_processes_of_one_machine_share_memory(machine, capfd, transfers):
    found = peers(Told(list(OTHER)), transfers)
    assert found is not None
    assert (found.rank, found.size) == (0, 2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([("there", 1), ""], "several machines"),
        ([("here", 1), "GPU 1 cannot reach the memory of GPU 0"], "GPU 1 cannot reach the memory of GPU 0"),
        ([("here", 1), "", "no such call"], "no such call"),
        ([("here", 1), "", "", "pidfd_getfd is not permitted"], "pidfd_getfd is not permitted"),
    ],
)
def test_what_keeps_one_from_it_keeps_all_and_is_said(machine, capfd, others, reason):
    with pytest.raises(ConfigError, match=f"transfers=copies: .*{reason}"):
        peers(Told(list(others)))
    capfd.readouterr()
    told = Told(list(others))
    assert peers(told, "auto") is None
    assert capfd.readouterr().err.splitlines() == [f"gradients travel by NCCL: {_whole(reason)}"]
    # Nobody is left waiting for an answer.
    assert told.others == []


def _whole(reason: str) -> str:
    return f"the processes are on {reason}" if reason == "several machines" else reason


@pytest.mark.parametrize("act", [joining.join_processes, joining.of_ranks])
def test_auto_is_what_is_taken_unasked(act):
    assert inspect.signature(act).parameters["transfers"].default == TrainConfig().transfers == "auto"


def test_the_first_alone_says_it(machine, capfd):
    told = Told([("there", 1), ""])
    told.rank = 1
    assert peers(told, "auto") is None
    assert capfd.readouterr().err == ""


def test_the_first_gpu_may_be_the_one_that_cannot_be_reached(machine):
    machine.setattr(torch.cuda, "current_device", lambda: 1)
    machine.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 0)
    assert joining._apart([("here", 0), ("here", 1)]) == "GPU 1 cannot reach the memory of GPU 0"
    machine.setattr(torchrun, "machines", lambda: 2)
    assert joining._apart([("here", 0)]) == "the processes are on several machines"


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, AssertionError])
@pytest.mark.parametrize(
    ("where", "name", "others"),
    [
        (joining, "mean_of", OTHER[:2]),  # as Triton without a compiler
        (torch.cuda, "can_device_access_peer", OTHER[:2]),  # as of a GPU that this process does not see
        (_symmetric_memory, "empty", OTHER[:3]),
        (_symmetric_memory, "rendezvous", OTHER),
    ],
)
def test_whatever_fails_here_leads_all_to_nccl(machine, capfd, where, name, others, kind):
    machine.setattr(where, name, failing("it is not permitted\nand a trace", kind))
    with pytest.raises(ConfigError, match="transfers=copies: it is not permitted; expected GPUs"):
        peers(Told(list(others)))
    capfd.readouterr()
    told = Told(list(others))
    assert peers(told, "auto") is None
    assert told.said[-1] == "it is not permitted"
    assert told.others == []
    assert capfd.readouterr().err == "gradients travel by NCCL: it is not permitted\n"


def test_gpus_without_atomics_on_each_other_meet_only_if_they_are_told_to(machine):
    machine.setattr(joining, "atomics_reach", lambda own, other: False)
    told = Told([("here", 1), ""])
    assert peers(told, "auto") is None
    assert told.said[-1] == "GPU 0 has no atomic operations on the memory of GPU 1"
    assert peers(Told(list(OTHER)), "copies") is not None


def test_a_driver_that_is_not_there_does_not_forbid_atomics(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", failing("libcuda.so.1: cannot open shared object file", OSError))
    assert atomics_reach(0, 1)


def test_memory_is_asked_for_again_without_what_pytorch_keeps(machine):
    full = [True]

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if full[0]:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(count, dtype=dtype)

    machine.setattr(_symmetric_memory, "empty", empty)
    machine.setattr(torch.cuda, "empty_cache", lambda: full.__setitem__(0, False))
    told = Told(["", "", "", ""])
    memory = SymmetricMemory(None, torch.device("cpu"), 1, told.gather)
    own, theirs = memory.allocate(512)
    assert (own.shape, theirs.shape, own.any()) == ((512,), (512,), False)


@pytest.fixture
def full(machine):
    """Return a maker of processes whose peers have memory for the first two buckets only."""

    def make(must_share: bool) -> Processes:
        told = Told([*OTHER, *([""] * 8)])  # of two buckets and two inboxes, each allocated and met
        found = peers(told)
        told.others += ["out of memory"]
        processes = Processes(None, None, found, must_share=must_share)
        processes.size = 2
        assert processes.transfer.shared(torch.zeros(1), 128) is not None
        assert processes.transfer.shared(torch.zeros(1), 128) is not None
        return processes

    return make


def test_a_bucket_without_memory_travels_by_nccl_and_so_do_later_ones(full, capfd):
    processes = full(must_share=False)
    processes.transfer._group = processes.transfer._devices = object()
    assert processes.transfers == "copies"
    assert processes.transfer.shared(torch.zeros(1), 128) is None
    assert processes.transfer.shared(torch.zeros(1), 128) is None
    assert capfd.readouterr().err == "further gradients travel by NCCL: out of memory\n"
    assert processes.transfers == "nccl"


def test_copies_by_name_need_their_memory(full):
    with pytest.raises(CannotShareError, match="transfers=copies: out of memory; transfers=nccl needs no such memory"):
        full(must_share=True).transfer.shared(torch.zeros(1), 128)

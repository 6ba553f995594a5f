"""Rendezvous of the processes that torchrun has started."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fullstride.errors import ConfigError, one_of
from fullstride.process import torchrun as launched
from fullstride.runs.atomic_files import note
from fullstride.step.torch.distributed.peer_copies import (
    CannotShareError,
    PeerCopies,
    SymmetricMemory,
    atomics_reach,
    mean_of,
    reason,
)
from fullstride.step.torch.distributed.processes import SINGLE, Processes, let_go

TRANSFERS = ("auto", "copies", "nccl")
# All come within the first; the others wait for the second while the first one evaluates or saves, and on a GPU for the
# third while the slowest compiles its step.
MEETING, PATIENCE, COMPILING = timedelta(minutes=5), timedelta(hours=24), timedelta(hours=1)


@contextmanager
def join_processes(device: str = "cpu", transfers: str = "auto") -> Iterator[Processes]:
    """Join all processes that torchrun has started.

    Args:
        device: type of the device that they train on. On `cuda` each takes the GPU of its local rank, which is the
            current one from then on.
        transfers: transport of gradients between GPUs: `copies`, by the copy engines of one machine's GPUs; `nccl`;
            or `auto`, copies if possible and NCCL otherwise.

    Raises:
        ConfigError: if this one was not started by torchrun, there is no GPU for it, or the GPUs cannot reach each
            other's memory and `transfers` is `copies`.

    """
    one_of("transfers", transfers, TRANSFERS)
    if not launched.by_torchrun():
        raise ConfigError(
            "distributed=ddp or fsdp: expected several processes, got one; start them with torchrun "
            "--nproc-per-node N -m fullstride ..."
        )
    if device == "cuda":
        torch.cuda.set_device(_own_gpu())
    # What processes of an earlier attempt have left in torchrun's store must not be taken for the present ones'.
    # Machines count their restarts each for itself.
    attempt = launched.restarts() if launched.machines() == 1 else 0
    store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MEETING)
    try:
        processes = of_ranks(range(size), device, transfers)
        try:
            yield processes
        except BaseException:
            let_go()
            processes.abandon()
            raise
        let_go()
    finally:
        dist.destroy_process_group()


def of_ranks(ranks: Iterable[int], device: str, transfers: str = "auto") -> Processes:
    """Make a group of some of the joined processes; collective for all of them.

    Raises:
        ConfigError: as `join_processes`.

    """
    ranks = list(ranks)
    patient = dist.new_group(ranks, timeout=PATIENCE, backend="gloo")
    devices = None
    if device == "cuda":
        own = torch.device("cuda", torch.cuda.current_device())
        devices = dist.new_group(ranks, timeout=COMPILING, backend="nccl", device_id=own)
    if dist.get_rank() not in ranks:
        return SINGLE
    assert isinstance(patient, dist.ProcessGroup)
    assert not isinstance(devices, int)
    alone = Processes(patient, devices)
    if devices is None or len(ranks) == 1 or transfers == "nccl":
        return alone
    return Processes(patient, devices, _peers(alone, devices, transfers), must_share=transfers == "copies")


def _peers(processes: Processes, group: dist.ProcessGroup, transfers: str) -> PeerCopies | None:
    """Return the processes whose GPUs reach each other's memory; None, logged by the first process, if one does not."""
    device = torch.device("cuda", torch.cuda.current_device())
    places = processes.gather((socket.gethostname(), device.index))
    # One that cannot must keep the others from waiting for it.
    if not (why := next(filter(None, processes.gather(_hindrance(places, device, transfers))), "")):
        try:
            memory = SymmetricMemory(group, device, round(1e3 * COMPILING.total_seconds()), processes.gather)
            return PeerCopies(processes.rank, processes.size, memory, device)
        except CannotShareError as refused:
            why = str(refused)
    if transfers == "copies":
        raise ConfigError(f"transfers=copies: {why}; expected GPUs that reach each other's memory, or transfers=nccl")
    if processes.leads:
        note(f"gradients travel by NCCL: {why}")
    return None


def _hindrance(places: list[tuple[str, int]], device: torch.device, transfers: str) -> str:
    """Return why this process should not share memory with those at these places; empty if it may be able to."""
    try:
        if apart := _apart(places):
            return apart
        own = torch.cuda.current_device()
        far = [i for _, i in places if i != own and not atomics_reach(own, i)]
        if far and transfers == "auto":
            return f"GPU {own} has no atomic operations on the memory of GPU {far[0]}"
        # A machine without a compiler for Triton's launchers has no other use for one.
        one = torch.ones(256, device=device)
        mean_of(one, one[None], 0, one)
    except Exception as error:
        return reason(error)
    return ""


def _apart(places: list[tuple[str, int]]) -> str:
    """Return why processes on these machines' GPUs cannot write into each other's memory; empty if they may."""
    if launched.machines() > 1 or len({host for host, _ in places}) > 1:
        return "the processes are on several machines"
    own = torch.cuda.current_device()
    far = [i for _, i in places if i != own and not torch.cuda.can_device_access_peer(own, i)]
    return f"GPU {own} cannot reach the memory of GPU {far[0]}" if far else ""


def _own_gpu() -> int:
    own, count = launched.local_rank(), torch.cuda.device_count()
    if own >= count:
        raise ConfigError(
            f"process {own} of this machine has no GPU: {count} visible; expected one each, start as many processes "
            "as there are GPUs (torchrun --nproc-per-node)"
        )
    return own

"""PyTorch's symmetric memory: physical memory of each GPU that all GPUs of a group have mapped."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullstride.step.torch.distributed.peer_copies import ALIGNED

T = TypeVar("T")

NATIVE_ATOMICS = 3  # the driver's CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Refused(RuntimeError):  # noqa: N818, it may lead to NCCL
    """Memory that processes cannot share; raised by all of them together, with the first one's reason."""


def reason(error: Exception) -> str:
    """An error in a line."""
    return str(error).partition("\n")[0] or type(error).__name__


def atomics_reach(own: int, other: int) -> bool:
    """Whether a GPU's atomic operations work on another's memory; True where the driver does not say."""
    found = ctypes.c_int(1)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return True
    failed = ask(ctypes.byref(found), NATIVE_ATOMICS, own, other)
    return bool(failed or found.value)


class Symmetric:
    """Such memory of one group of processes."""

    def __init__(self, group: Any, device: torch.device, patience_ms: int, gather: Callable[[str], list[str]]):
        """Take a group of NCCL's on one machine; collective.

        Args:
            group: of processes.
            device: this process's GPU.
            patience_ms: how long a process that is missed is waited for before the GPU gives up.
            gather: what all of them say, by rank; collective.

        Raises:
            Refused: if these GPUs cannot reach each other's memory.

        """
        self._group, self._device, self._patience, self._gather = group, device, patience_ms, gather
        self._handle, _ = self._met(ALIGNED)

    def allocate(self, count: int) -> Sequence[Tensor]:
        """So many bytes, zeros, of every process by rank; collective.

        Raises:
            Refused: on all of them, if one cannot have it.

        """
        handle, own = self._met(count)
        theirs = [handle.get_buffer(rank, (count,), torch.uint8) for rank in range(handle.world_size)]
        theirs[handle.rank] = own
        return theirs

    def meet(self) -> None:
        """Let the current stream wait until all processes' are here; what they wrote before is there then."""
        self._handle.barrier(channel=0, timeout_ms=self._patience)

    def _met(self, count: int) -> tuple[Any, Tensor]:
        own = self._agreed(lambda: self._own(count))

        def met() -> Any:
            from torch.distributed import _symmetric_memory as symmetric

            return symmetric.rendezvous(own, self._group)

        # One that has no memory must not let the others wait for it there.
        return self._agreed(met), own

    def _own(self, count: int) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        try:
            own = symmetric.empty(count, dtype=torch.uint8, device=self._device)
        except RuntimeError:
            # What PyTorch keeps for tensors to come is nobody else's; with it there may be enough.
            torch.cuda.empty_cache()
            own = symmetric.empty(count, dtype=torch.uint8, device=self._device)
        own.zero_()
        # The others may write into it as soon as they have met this process.
        torch.cuda.synchronize(self._device)
        return own

    def _agreed(self, act: Callable[[], T]) -> T:
        """What `act` returns here, once it has returned everywhere."""
        made, failed = list[T](), ""
        try:
            made.append(act())
        except Exception as error:
            failed = reason(error)
        if first := next(filter(None, self._gather(failed)), ""):
            raise Refused(first)
        return made[0]

"""Choice of a run's device: a named one is available or refused with the reason; only `auto` chooses."""

import os
from typing import TYPE_CHECKING

from fullstride.errors import ConfigError, one_of

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cuda", "mps", "cpu")


def unavailable(name: str) -> str | None:
    """Return the reason why this machine cannot use `cuda`, `mps` or `cpu`, with the remedy; None if it can."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        if not torch.backends.cuda.is_built():
            return (
                f"this torch ({torch.__version__}) is built without CUDA; install a CUDA build of it "
                "(https://pytorch.org/get-started/locally) or use device=cpu"
            )
        return "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device=cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        if not torch.backends.mps.is_built():
            return "this torch is built without MPS, which is macOS's; use device=cpu"
        return "MPS needs a Mac with Apple silicon and a newer macOS; update it or use device=cpu"
    return None


def resolve_device(name: str) -> "torch.device":
    """Return the device of that name; `auto` takes the first available one of cuda, mps and cpu.

    Raises:
        ConfigError: for an unknown name, or a named device that is unavailable, with the reason and the remedy.

    """
    import torch

    one_of("device", name, DEVICES)
    if name == "auto":
        return torch.device(next(device for device in DEVICES[1:] if unavailable(device) is None))
    if reason := unavailable(name):
        raise ConfigError(f"device={name}: {reason}")
    return torch.device(name)


def describe(device: "torch.device") -> str:
    """Return a readable name of a device, such as `cuda (NVIDIA H200)`."""
    import torch

    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def cores() -> int:
    """The processor cores that this process may use; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_each() -> int:
    """A share of them, one at least, for each of the processes that `torchrun` started on this machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

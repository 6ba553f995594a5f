"""The devices that `fullstride doctor` finds, and what each framework computes on."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from fullstride.device.select import cores, describe, resolve_device, unavailable
from fullstride.extras import version

# In a process of its own, which holds no GPU's memory and may hang: JAX finds its devices once, and takes most of one.
_JAX_DEVICE = """
import jax
device = jax.devices()[0]
print(device.platform, getattr(device, "compute_capability", ""), device.device_kind, sep="|")
"""
PATIENCE = 60.0  # seconds


def imported_torch() -> ModuleType | None:
    """PyTorch; None if it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):  # the latter where a library of CUDA's is gone
        return None
    return torch


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


@dataclass(frozen=True)
class JaxDevice:
    """What JAX computes on unless told: its platform ("cpu", "gpu"), and of a GPU its capability and what it is."""

    platform: str
    capability: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """As in `gpu (NVIDIA H100, capability 9.0)`."""
        return f"{self.platform} ({self.kind}, capability {self.capability})" if self.capability else self.platform


def jax_device() -> JaxDevice | None:
    """The first that JAX finds; None where it is not installed, finds none or does not answer."""
    if version("jax") is None:
        return None
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    line = [sys.executable, "-c", _JAX_DEVICE]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return JaxDevice(*done.stdout.splitlines()[-1].split("|")) if done.returncode == 0 else None  # plugins may print


def devices(jax: JaxDevice | None) -> Iterator[tuple[str, str]]:
    """Name and description of each device, and what each framework takes."""
    yield "CPU", f"{platform.machine()}, {cores()} cores, {_memory()} RAM"
    if jax is not None:
        yield "JAX", str(jax)
    if (torch := imported_torch()) is None:
        return
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"CUDA {i}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    if unavailable("mps") is None:
        yield "MPS", "Apple GPU, shares the RAM"
    yield "device=auto", describe(resolve_device("auto"))

"""GPUs that kernels are compiled for."""

from typing import Any, NamedTuple


class Target(NamedTuple):
    """GPU that a kernel is compiled for.

    Attributes:
        capability: compute capability, times ten.
        architecture: instruction set of the PTX: this GPU's own or an older one that it runs, too.
        clusters: whether the blocks of a cluster exchange data through shared memory.
        shared: bytes of shared memory of a block, at most.

    """

    capability: int
    architecture: str
    clusters: bool
    shared: int


# wgmma and setmaxnreg are in Hopper's own instruction set alone, whose name has a letter.
HOPPER = Target(90, "90a", clusters=True, shared=227 << 10)
# From the CUDA programming guide; of any other GPU the least of them is assumed.
SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
LEAST_SHARED = 99 << 10
OLDEST = 80


def capability_of(device: Any) -> str:
    """Return the compute capability of a JAX device, such as `9.0`; of a CPU the name of its platform."""
    return getattr(device, "compute_capability", device.platform)


def target_of(capability: str) -> Target | None:
    """Return the target of a device; None for what is no NVIDIA GPU of compute capability 8.0 or newer."""
    major, _, minor = capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()) or (number := 10 * int(major) + int(minor)) < OLDEST:
        return None
    if number == HOPPER.capability:
        return HOPPER
    clusters = number > HOPPER.capability
    return Target(number, "90" if clusters else "80", clusters, SHARED.get(number, LEAST_SHARED))

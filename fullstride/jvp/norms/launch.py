"""Sizes and the call of a kernel."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fullstride.device import triton_compile


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def padded(n: int) -> int:
    """Return the least power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def contiguous(a: Tensor | None) -> Tensor | None:
    """`a` row-major, if it is there."""
    return None if a is None else a.contiguous()


@cache
def _hopper(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps(x: Tensor) -> bool:
    """Return whether x's device can start a kernel before the previous one ends (programmatic dependent launch)."""
    return x.is_cuda and _hopper(x.device)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int,
    registers: int | None = None,
    early: bool = False,
) -> None:
    """Run a kernel on a grid of programs, if there are any; inside `triton_compile.compile_only` only compile it.

    Args:
        kernel: Triton kernel.
        grid: numbers of programs.
        arguments: arguments of the kernel.
        warps: number of warps of a program.
        registers: maximum number of registers per thread.
        early: start as soon as the previous kernel allows; the kernel itself then waits for that one.

    """
    options: dict[str, Any] = {"num_warps": warps}
    if registers is not None:
        options["maxnreg"] = registers
    if early:
        options["launch_pdl"] = True
    triton_compile.launch(kernel, grid, arguments, options)

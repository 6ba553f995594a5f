"""Sizes and the call of a kernel."""

from typing import Any

from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    """How many pieces of b hold a."""
    return -(-a // b)


def padded(n: int) -> int:
    """The least power of two that is at least n, and 1."""
    return 1 << max(n - 1, 0).bit_length()


def contiguous(a: Tensor | None) -> Tensor | None:
    """`a` row-major, if it is there."""
    return None if a is None else a.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, registers: int | None = None) -> None:
    """Run a kernel on a grid of programs, if there are any; `registers` bounds those of a thread."""
    if all(grid):
        kernel[grid](*arguments, num_warps=warps, **({} if registers is None else {"maxnreg": registers}))

"""Traces operators of norms as a compiler does, on a machine without a GPU; a process of its own.

Their kernels are compiled for Hopper by threads. The driver's part is played, and CPUs count as devices with kernels.
"""

import sys
import threading
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from fullstride import ahead
from fullstride.jvp.norms import pairs, row_backward, row_forward
from fullstride.jvp.norms.partials import sum_kernel
from tests.jvp.ahead import Hopper

WIDTH = 72
KERNELS = (row_forward.forward_kernel, row_backward.backward_kernel, sum_kernel)


def known(kernel: Any) -> int:
    """How many kernels a function was compiled to."""
    return len(kernel.device_caches[0][0])


def traced(rows: int) -> None:
    """Forward and backward through `torch.ops`, whose results are fake."""
    assert pairs.RMS_NORM.traceable
    with FakeTensorMode():
        x, weight = torch.empty(rows, WIDTH, dtype=torch.bfloat16), torch.empty(WIDTH)
        y, ty, rstd = torch.ops.fullstride.rms_norm(x, weight, x, None, 1e-5, None, "triton", True)
        assert y.shape == ty.shape == x.shape
        saved = (x, weight, x, None, None, None, rstd)
        torch.ops.fullstride.rms_norm_backward(y, ty, *saved, 1e-5, None, "triton")


def main() -> None:
    """Each kernel is compiled once, by another thread, and is there when all are waited for."""
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    ahead.KIND = "cpu"
    threads = set()
    compile_here = triton.compiler.compile

    def told(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return compile_here(*args, **kwargs)

    triton.compiler.compile = told
    traced(40)
    traced(40)
    assert [known(kernel) for kernel in KERNELS] == [0, 0, 0]
    ahead.settle()
    assert [known(kernel) for kernel in KERNELS] == [1, 1, 1]
    assert threads
    assert threading.main_thread() not in threads
    sys.stdout.write("compiled while traced\n")


if __name__ == "__main__":
    main()

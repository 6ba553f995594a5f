"""Tracing of operators as in a compiler, without a GPU, in a process of its own.

Their kernels are compiled for Hopper by threads or processes. The driver's part is played, and CPUs count as devices
with kernels.
"""

import os
import sys
import threading
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from fullstride.device import triton_compile
from fullstride.jvp.attention import backward_keys, backward_queries, forward_kernel
from fullstride.jvp.attention import recompute as weights
from fullstride.jvp.attention import register as pairs
from fullstride.jvp.norms import group_onepass_backward, group_onepass_forward, row_backward, row_forward
from fullstride.jvp.norms import register as norms
from fullstride.jvp.norms.reduce_params import sum_kernel
from tests.jvp.ahead import Hopper

WIDTH, IMAGES, HEADS = 72, (2, 8, 4, 4), (2, 3, 16, 16)
ROWS = (row_forward.forward_kernel, row_backward.backward_kernel, sum_kernel)
GROUPS = (group_onepass_forward.forward_kernel, group_onepass_backward.backward_kernel)
ATTENTION = (forward_kernel.dual_forward, weights.row_sums, backward_keys.key_gradients)
KERNELS = (*ROWS, *GROUPS, *ATTENTION, backward_queries.query_gradients)
# That of parameters' sums is compiled for rows and for images.
COMPILED = [1 + (kernel is sum_kernel) for kernel in KERNELS]


def known() -> list[int]:
    """Number of compiled kernels of each function, without those that Triton 3.8 is still compiling."""
    kept = [kernel.device_caches[0][0].values() for kernel in KERNELS]
    return [sum(type(each).__name__ != "FutureKernel" for each in found) for found in kept]


def traced(rows: int) -> None:
    """Forward and backward through `torch.ops`, whose results are fake."""
    operators = norms.RMS_NORM, norms.GROUP_NORM, pairs.ATTENTION
    assert [each.name for each in operators] == ["rms_norm", "group_norm", "attention"]  # registered
    with FakeTensorMode():
        x, weight = torch.empty(rows, WIDTH, dtype=torch.bfloat16), torch.empty(WIDTH)
        y, ty, rstd = torch.ops.fullstride.rms_norm(x, weight, x, None, 1e-5, None, "triton", True)
        assert y.shape == ty.shape == x.shape
        saved = (x, weight, x, None, None, None, rstd)
        torch.ops.fullstride.rms_norm_backward(y, ty, *saved, 1e-5, None, "triton", True)
        image, column = torch.empty(IMAGES, dtype=torch.bfloat16), torch.empty(IMAGES[1])
        primals, given = (image, None, column, column), (2, 1e-5, "silu", None, "triton")
        y, ty, *moments = torch.ops.fullstride.group_norm(*primals, image, None, None, None, *given, True)
        saved = (*primals, image, *[None] * 5, *moments)
        torch.ops.fullstride.group_norm_backward(y, ty, *saved, *given, True)
        q = torch.empty(HEADS, dtype=torch.bfloat16)
        settings = 0.1, False, -1, -1, "", "triton"
        o, to, *rest = torch.ops.fullstride.attention(q, q, q, None, q, q, q, *settings, True)
        assert o.shape == to.shape == q.shape
        torch.ops.fullstride.attention_backward(o, to, q, q, q, None, q, q, q, o, to, *rest, *settings, False)


def check_threads() -> None:
    """Each kernel is compiled once, by another thread, and is there when all are waited for."""
    threads = set()
    compile_here = triton.compiler.compile

    def told(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return compile_here(*args, **kwargs)

    triton.compiler.compile = told
    traced(40)
    traced(40)
    assert known() == [0] * len(KERNELS)
    triton_compile.wait_for_compiles()
    assert known() == COMPILED
    assert threads
    assert threading.main_thread() not in threads


def check_processes(ptxas: str) -> None:
    """Check that the cache already holds the kernels that this process compiles."""
    from torch._inductor.async_compile import AsyncCompile

    # Their assembler is another, as where PyTorch brings its own.
    os.environ["TRITON_PTXAS_PATH"] = ptxas
    triton_compile.start_processes(torch.device("cpu"))
    AsyncCompile.wait_pool_ready()
    os.environ.pop("TRITON_PTXAS_PATH")
    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    traced(40)
    triton_compile.wait_for_compiles()
    assert known() == COMPILED
    assert hits == [True] * sum(COMPILED)


def check_changed() -> None:
    """Check that a changed source is compiled here, and that other processes leave nothing in the cache."""
    from torch._inductor.async_compile import AsyncCompile

    triton_compile.start_processes(torch.device("cpu"))
    AsyncCompile.wait_pool_ready()
    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    triton_compile.IMPORTED = 0.0  # all files were edited since
    traced(40)
    triton_compile.wait_for_compiles()
    assert known() == COMPILED
    assert hits == [False] * sum(COMPILED)


def main(by: str, *ptxas: str) -> None:
    """Compile by threads or processes."""
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    triton_compile.KIND = "cpu"
    {"threads": check_threads, "processes": check_processes, "changed": check_changed}[by](*ptxas)
    sys.stdout.write("compiled while traced\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

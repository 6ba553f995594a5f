"""Compilation of kernels for Hopper as their launchers run them, without a GPU, in a process of its own.

Triton's interpreter accepts code that its compiler rejects. Tensors are fake, and so is the driver.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fullstride.jvp.attention import backward
from fullstride.jvp.attention import launch_forward as forward
from fullstride.jvp.norms import group_norm, rows
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from fullstride.step.torch.ema.lerp_kernel import LerpTable

META = torch.device("meta")
# Tuples of tensors are handed on as they come.
FORWARD: Any = forward
BACKWARD: Any = backward
ROWS: Any = rows
IMAGES: Any = group_norm
compiled: list[str] = []


class Hopper:
    """Driver of an absent Hopper GPU, with what a launch needs."""

    def get_current_target(self) -> GPUTarget:
        """Return an H200's target."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return device


def install() -> None:
    """Let every launch only compile its kernel."""
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attention(dim: int, dtype: torch.dtype, absent: str = "", through: bool = True, **options: Any) -> None:
    """Compile forward and backward of one attention."""
    q, k = empty(2, 4, 200, dim, dtype=dtype), empty(2, 2, 230, dim, dtype=dtype)
    tangents = [None if name in absent.split() else x for name, x in zip(("tq", "tk", "tv"), (q, k, k), strict=True)]
    if options.pop("masked", False):
        options["mask"] = empty(1, 1, 200, 230, dtype=torch.bool).expand(2, 4, 200, 230)
    saved: Any = FORWARD.forward(q, k, k, *tangents, scale=0.1, **options)
    gto = empty(2, 4, 200, dim, dtype=dtype) if through else None
    BACKWARD.backward(empty(2, 4, 200, dim, dtype=dtype), gto, q, k, k, *tangents, *saved, scale=0.1, **options)


def packed(dim: int) -> None:
    """Compile attention of packed sequences."""
    q, k = empty(300, 4, dim), empty(330, 2, dim)
    starts = empty(5, dtype=torch.int32)
    saved: Any = FORWARD.forward_varlen(q, k, k, q, k, k, starts, starts, 100, 120, scale=0.1, causal=True)
    options: Any = {"max_seqlen_q": 100, "max_seqlen_k": 120, "scale": 0.1, "causal": True}
    BACKWARD.backward_varlen(
        empty(300, 4, dim), empty(300, 4, dim), q, k, k, q, k, k, *saved, starts, starts, **options
    )


def attentions(few: bool) -> None:
    """Compile attention of each kind of head dim, and of each kind of arguments."""
    attention(80, torch.bfloat16, masked=True, through=False)
    packed(64)
    if few:
        return
    for dim in (72, 160):
        attention(dim, torch.bfloat16)
    attention(64, torch.float32, through=False)
    attention(64, torch.bfloat16, absent="tk tv", causal=True)
    attention(128, torch.bfloat16, absent="tq", window=(30, 5), through=False)


def norms() -> None:
    """Compile norms of rows and images, with and without tangents."""
    x, w, images, c = empty(4, 16, 1152), empty(1152), empty(4, 64, 16, 16), empty(64)
    for t in (x, None):
        saved: Any = ROWS.row_norm(ROW_NORMS["layer_norm"], x, t, Affine(w, w), 1e-5)[2:]
        ROWS.row_norm_backward(ROW_NORMS["layer_norm"], x, t, x, t, Affine(w, w), saved)
    samples = Affine(*[empty(4, 1152)] * 4)
    saved = ROWS.row_norm(ROW_NORMS["ada_layer_norm"], x, x, samples, 1e-5)[2:]
    ROWS.row_norm_backward(ROW_NORMS["ada_layer_norm"], x, x, x, x, samples, saved)
    for last, t in ((False, True), (True, False)):
        form = torch.channels_last if last else torch.contiguous_format
        image = images.contiguous(memory_format=form)
        tangent = image if t else None
        shift = empty(4, 64)
        for shifts in ((None, None), (shift, shift if t else None)):
            saved = IMAGES.group_norm(image, tangent, 16, Affine(c, c), 1e-5, "silu", shifts=shifts)[2:]
            given = image, tangent, image, tangent, 16, Affine(c, c), saved
            IMAGES.group_norm_backward(*given, "silu", shifts=shifts)


def averages() -> None:
    """Launch the kernel of weight averages."""
    LerpTable([empty(70, dtype=torch.float32)], [[empty(70, dtype=torch.float32)]] * 2)(empty(2, dtype=torch.float64))


def main(which: str) -> None:
    """Compile all families, attention with `few` or `all` kinds of arguments."""
    install()
    families: dict[str, Callable[[], None]] = {"norms": norms, "averages": averages}
    for name, family in {"attentions": lambda: attentions(which == "few"), **families}.items():
        compiled.clear()
        family()
        sys.stdout.write(f"{name}: {len(compiled)} launches: {', '.join(sorted(set(compiled)))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

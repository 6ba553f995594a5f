"""Choice of an op's implementation: PyTorch operations, or fused kernels in Triton."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

NAMES = ("auto", "plain", "triton")


_plain_only = False


@contextmanager
def only_plain() -> Iterator[None]:
    """Use PyTorch operations even if another implementation is named, to compute a reference."""
    global _plain_only
    before, _plain_only = _plain_only, True
    try:
        yield
    finally:
        _plain_only = before


def chosen(name: str, x: Tensor, fits: bool = True) -> str:
    """`plain` or `triton`.

    `auto` is the Triton kernels on NVIDIA GPUs from sm_80 on, and plain in fp64 and for sizes that kernels do not take.

    Args:
        name: one of `NAMES`.
        x: a tensor of the call.
        fits: whether the kernels support its sizes.

    Raises:
        ValueError: for an unknown name, and for `triton` if its kernels cannot run.

    """
    if name not in NAMES:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(NAMES)}")
    if _plain_only:
        return "plain"
    able = x.is_cuda and x.dtype != torch.float64 and _has_kernels()
    if name == "triton" and not able:
        raise ValueError(
            f"implementation is 'triton' and the tensors are {x.dtype} on {x.device}, expected fp32, fp16 or bf16 on "
            "an NVIDIA GPU from sm_80 on, with triton installed; use implementation='plain'"
        )
    if name == "auto":
        return "triton" if able and fits else "plain"
    return name


@torch.compiler.assume_constant_result
def _has_kernels() -> bool:
    return _runs_kernels(torch.cuda.current_device())


@cache
def _runs_kernels(device: int) -> bool:
    installed = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    return installed and torch.cuda.get_device_capability(device) >= (8, 0)

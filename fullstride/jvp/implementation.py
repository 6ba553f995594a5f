"""Which implementation of an op runs: plain PyTorch operations, or fused kernels in Triton."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NAMES = ("auto", "plain", "triton")


_plain_only = False


@contextmanager
def only_plain() -> Iterator[None]:
    """Plain operations also where another implementation is named: what a reference is computed with."""
    global _plain_only
    before, _plain_only = _plain_only, True
    try:
        yield
    finally:
        _plain_only = before


def chosen(name: str, x: Tensor) -> str:
    """`plain` or `triton`.

    `auto` is plain: the kernels are verified in Triton's interpreter and compile for Hopper, but until they have been
    run and timed on a GPU they are taken by name only.

    Raises:
        ValueError: for another name, and for `triton` where its kernels cannot run.

    """
    if name not in NAMES:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(NAMES)}")
    if _plain_only:
        return "plain"
    if name == "triton" and (not x.is_cuda or x.dtype == torch.float64):
        raise ValueError(
            f"implementation is 'triton' and the tensors are {x.dtype} on {x.device}, expected fp32, fp16 or bf16 on "
            "an NVIDIA GPU; use implementation='plain'"
        )
    return "plain" if name == "auto" else name

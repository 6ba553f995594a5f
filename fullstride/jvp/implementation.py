"""Which implementation of an op runs: plain PyTorch operations, or fused kernels in Triton."""

import torch
from torch import Tensor

NAMES = ("auto", "plain", "triton")


def chosen(name: str, x: Tensor) -> str:
    """`plain` or `triton`; `auto` is Triton on a GPU.

    Raises:
        ValueError: for another name, and for `triton` where its kernels cannot run.

    """
    if name not in NAMES:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(NAMES)}")
    fused = x.is_cuda and x.dtype != torch.float64
    if name == "triton" and not fused:
        raise ValueError(
            f"implementation is 'triton' and the tensors are {x.dtype} on {x.device}, expected fp32, fp16 or bf16 on "
            "an NVIDIA GPU; use implementation='plain'"
        )
    return ("triton" if fused else "plain") if name == "auto" else name

"""Which implementation of an op runs: plain PyTorch operations, or fused kernels in Triton."""

import torch
from torch import Tensor

NAMES = ("auto", "plain", "triton")


def chosen(name: str, x: Tensor) -> str:
    """`plain` or `triton`.

    `auto` is plain: the kernels are verified in Triton's interpreter and compile for Hopper, but until they have been
    run and timed on a GPU they are taken by name only.

    Raises:
        ValueError: for another name, and for `triton` where its kernels cannot run.

    """
    if name not in NAMES:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(NAMES)}")
    if name == "triton" and (not x.is_cuda or x.dtype == torch.float64):
        raise ValueError(
            f"implementation is 'triton' and the tensors are {x.dtype} on {x.device}, expected fp32, fp16 or bf16 on "
            "an NVIDIA GPU; use implementation='plain'"
        )
    return "plain" if name == "auto" else name

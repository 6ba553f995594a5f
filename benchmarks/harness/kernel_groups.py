"""Kernels of a profile, grouped by purpose."""

import re
from functools import cache
from typing import Any

TOP = 15
# The first that a kernel's name matches. XLA's fused kernels are pointwise, norms too: their names tell no more. On a
# processor an operation's name stands for its kernel.
GROUPS = {
    "optimizer": r"adam|multi_tensor|lerp_kernel|foreach",
    "attention": r"dual_forward|key_gradients|query_gradients|row_sums|flash|fmha|attention|softmax|sdpa|sdp_",
    "norm": r"^(forward|backward|moments|apply|sums|gradients|sum)_kernel|norm(?!al_)|welford|rowwisemoments|gammabeta"
    r"|computefusedparams|computeinternalgradients",
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|winograd|cudnn|nchwtonhwc|nhwctonchw|im2col|col2im",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|addmm|bmm|\bmm\b|baddbmm|matmul|triton_tem",
    "pointwise": r"triton_|elementwise|vectorized|unrolled|copy|memcpy|memset|cat|reduce|fill|zero|upsample"
    r"|fusion|wrapped_|scatter|gather"  # XLA's names
    r"|^aten::(add|sub|mul|div|neg|exp|sin|cos|silu|sigmoid|pow|sum|mean|where|to|_to_copy|clone|rsqrt|lerp|addcmul)"
    r"(_|\b)",
}
Profile = dict[str, Any]
Kernel = tuple[str, float, float]


@cache
def group_of(kernel: str) -> str:
    """Return the group of kernels that `kernel` belongs to, by its name."""
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def summary(kernels: list[Kernel]) -> Profile:
    """Summarise kernels given as (name, milliseconds, launches): milliseconds of each group, and the longest ones."""
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, ms, _ in kernels:
        groups[group_of(name)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:TOP]
    top = [{"name": n[:160], "group": group_of(n), "ms": ms, "launches": count} for n, ms, count in longest]
    launches = sum(count for *_, count in kernels)
    return {"ms": sum(groups.values()), "launches": launches, "groups": groups, "kernels": top}

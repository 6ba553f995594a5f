"""Where the time of a step goes: torch.profiler's kernels, grouped by what they do."""

import re
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fullstride.bench.timing import Call

CALLS, TOP = 3, 15
# The first that a kernel's name matches; on a processor an operation's name stands for its kernel.
GROUPS = {
    "optimizer": r"adam|multi_tensor|lerp_kernel|foreach",
    "attention": r"dual_forward|key_gradients|query_gradients|row_sums|flash|fmha|attention|softmax|sdpa|sdp_",
    "norm": r"^(forward|backward|moments|apply|sums|gradients|sum)_kernel|norm|welford|rowwisemoments|gammabeta"
    r"|computefusedparams|computeinternalgradients",
    "convolution": r"conv|fprop|dgrad|wgrad|winograd|cudnn|nchwtonhwc|nhwctonchw|im2col|col2im",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|addmm|bmm|\bmm\b|baddbmm|matmul|triton_tem",
    "pointwise": r"triton_|elementwise|vectorized|unrolled|copy|memcpy|memset|cat|reduce|fill|zero|upsample"
    r"|^aten::(add|sub|mul|div|neg|exp|sin|cos|silu|sigmoid|pow|sum|mean|where|to|_to_copy|clone|rsqrt|lerp|addcmul)",
}
Profile = dict[str, Any]


def group_of(kernel: str) -> str:
    """What a kernel of that name does."""
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def profiled(call: Call, device: torch.device) -> Profile:
    """Milliseconds of a call by group, and its kernels that take longest with how often they are launched."""
    cuda = device.type == "cuda"
    call()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(CALLS):
            call()
        if cuda:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    kernels = [
        (e.key, (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e3 / CALLS, e.count / CALLS)
        for e in seen.key_averages()
        if e.device_type == wanted and not (cuda and e.is_user_annotation)
    ]
    return summary([k for k in kernels if k[1] > 0])


def summary(kernels: list[tuple[str, float, float]]) -> Profile:
    """The profile of kernels as (name, milliseconds, launches)."""
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, ms, _ in kernels:
        groups[group_of(name)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:TOP]
    top = [{"name": n[:160], "group": group_of(n), "ms": ms, "launches": count} for n, ms, count in longest]
    launches = sum(count for *_, count in kernels)
    return {"ms": sum(groups.values()), "launches": launches, "groups": groups, "kernels": top}

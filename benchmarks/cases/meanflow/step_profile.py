"""Profile of a step: torch.profiler's kernels, grouped by purpose."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fullstride.measure.timing import Call

CALLS, TOP = 3, 15
# The first that a kernel's name matches; on a processor an operation's name stands for its kernel.
GROUPS = {
    "optimizer": r"adam|multi_tensor|lerp_kernel|foreach",
    "attention": r"dual_forward|key_gradients|query_gradients|row_sums|flash|fmha|attention|softmax|sdpa|sdp_",
    "norm": r"^(forward|backward|moments|apply|sums|gradients|sum)_kernel|norm(?!al_)|welford|rowwisemoments|gammabeta"
    r"|computefusedparams|computeinternalgradients",
    "convolution": r"conv|fprop|dgrad|wgrad|winograd|cudnn|nchwtonhwc|nhwctonchw|im2col|col2im",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|addmm|bmm|\bmm\b|baddbmm|matmul|triton_tem",
    "pointwise": r"triton_|elementwise|vectorized|unrolled|copy|memcpy|memset|cat|reduce|fill|zero|upsample"
    r"|^aten::(add|sub|mul|div|neg|exp|sin|cos|silu|sigmoid|pow|sum|mean|where|to|_to_copy|clone|rsqrt|lerp|addcmul)"
    r"(_|\b)",
}
# On a processor these are made of other operations, whose time is theirs.
COMPOSED = ("attention", "norm")
Profile = dict[str, Any]
Kernel = tuple[str, float, float]


@cache
def group_of(kernel: str) -> str:
    """Return the group of kernels that `kernel` belongs to, by its name."""
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def profiled(call: Call, device: torch.device) -> Profile:
    """Return milliseconds of a call by group, and its longest kernels with their numbers of launches."""
    cuda = device.type == "cuda"
    call()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(CALLS):
            call()
        if cuda:
            torch.cuda.synchronize(device)
    return summary([k for k in (_of_device(seen) if cuda else _of_processor(seen.events() or ())) if k[1] > 0])


def _of_device(seen: profile) -> list[Kernel]:
    return [
        (e.key, e.self_device_time_total / 1e3 / CALLS, e.count / CALLS)
        for e in seen.key_averages()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]


def _of_processor(events: Iterable[Any]) -> list[Kernel]:
    """Return CPU operations by name, each without its children, unless they belong to an attention or norm."""
    ms, launches = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in events:
        whole = _whole(event)
        ms[whole.name] += event.self_cpu_time_total / 1e3 / CALLS
        launches[whole.name] += (whole is event) / CALLS
    return [(name, ms[name], launches[name]) for name in ms]


def _whole(event: Any) -> Any:
    """Return the outermost attention or norm that contains an operation, or the operation."""
    found, caller = event, event
    while caller is not None:
        found = caller if group_of(caller.name) in COMPOSED else found
        caller = caller.cpu_parent
    return found


def summary(kernels: list[Kernel]) -> Profile:
    """Summarise kernels given as (name, milliseconds, launches)."""
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, ms, _ in kernels:
        groups[group_of(name)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:TOP]
    top = [{"name": n[:160], "group": group_of(n), "ms": ms, "launches": count} for n, ms, count in longest]
    launches = sum(count for *_, count in kernels)
    return {"ms": sum(groups.values()), "launches": launches, "groups": groups, "kernels": top}

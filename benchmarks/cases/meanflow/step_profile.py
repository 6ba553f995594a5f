"""Profile of a step: torch.profiler's kernels, grouped by purpose."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.kernel_groups import Kernel, Profile, group_of, summary
from fullstride.measure.timing import Call

CALLS = 3
# On a processor these are made of other operations, whose time is theirs.
COMPOSED = ("attention", "norm")


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

"""Autocast around attention: its inputs are cast as SDPA's are, and its own operations are not."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast the tensors as autocast does for SDPA; an absent tensor stays absent."""
    there = [x for x in tensors if x is not None]
    if not there or there[0].dtype == torch.float64 or not torch.is_autocast_enabled(there[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(there[0].device.type)
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def without_autocast(run: Callable[..., Any], first: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose operations choose their own precision."""
    kind = first.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return run(first, *args, **kwargs)

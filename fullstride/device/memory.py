"""Out of memory: what a step took, and which batch would fit."""

import gc
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullstride.errors import is_out_of_memory

GIB = 2**30


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors on a GPU held since the last reset, or this process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release(device: torch.device) -> None:
    """Give back what nothing refers to, and begin to count the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class Fit:
    """A batch that was tried and went through."""

    batch_size: int
    accumulation: int
    peak: int


def fitting_batch(
    trial: Callable[[int], None],
    batch_size: int,
    accumulation: int,
    device: torch.device,
    allowed: Callable[[int], bool] = lambda size: True,
) -> Fit | None:
    """The largest smaller batch whose trial goes through, with the accumulation that keeps the optimizer's batch.

    Args:
        trial: runs a forward and backward pass of that many samples.
        batch_size: the one that did not fit.
        accumulation: its gradient_accumulation_steps.
        device: where.
        allowed: which sizes may be tried.

    Returns:
        None if not even the smallest fits.

    """
    total = batch_size * accumulation
    for size in (n for n in range(batch_size - 1, 0, -1) if total % n == 0 and allowed(n)):
        release(device)
        try:
            trial(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            return Fit(size, total // size, peak_memory(device))
    return None


def report(
    batch_size: int,
    accumulation: int,
    peak: int,
    fit: Fit | None,
    device: torch.device,
    step: str = "takes the same optimizer step",
) -> str:
    """The message of a step that did not fit; `step` says what that of the batch that fits is beside it."""
    if device.type == "cuda":
        where = f"of {torch.cuda.get_device_properties(device).total_memory / GIB:.1f} GiB of {device}"
    else:
        where = "resident"
    took = (
        f"out of memory at data.batch_size={batch_size} gradient_accumulation_steps={accumulation}: "
        f"the peak was {peak / GIB:.2f} GiB {where}"
    )
    if fit is None:
        return f"{took}; the smallest batch does not fit either: choose a smaller model"
    # The largest resident set cannot be reset: after the step that failed it says nothing about another.
    tried = f"tried: {fit.peak / GIB:.2f} GiB" if device.type == "cuda" else "tried"
    return (
        f"{took}; data.batch_size={fit.batch_size} gradient_accumulation_steps={fit.accumulation} fits "
        f"({tried}) and {step}; every checkpoint is untouched"
    )

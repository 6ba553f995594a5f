"""Out of memory: the peak of a step, and a batch that needs less."""

import gc
import resource
import sys

import torch

GIB = 2**30


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of tensors on a GPU since the last reset, or of this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release(device: torch.device) -> None:
    """Free unreferenced memory, and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def too_large(batch_size: int, accumulation: int, processes: int, device: torch.device) -> str:
    """Return the message of a step that did not fit: its peak, and a batch of half the size or less that needs less.

    Args:
        batch_size: number of images per micro-batch, all processes together.
        accumulation: the run's gradient_accumulation_steps.
        processes: number of processes that share it; each keeps at least two samples.
        device: device of the step.

    """
    if device.type == "cuda":
        where = f"of {torch.cuda.get_device_properties(device).total_memory / GIB:.1f} GiB of {device}"
    else:
        where = "resident"
    took = (
        f"out of memory at data.batch_size={batch_size} gradient_accumulation_steps={accumulation}: "
        f"the peak was {peak_memory(device) / GIB:.2f} GiB {where}"
    )
    total = batch_size * accumulation
    smaller = range(batch_size // 2 // processes * processes, processes, -processes)
    size = next((n for n in smaller if total % n == 0), None)
    if size is None:
        return f"{took}; there is no smaller batch with as many images per step; choose a smaller model"
    return (
        f"{took}; data.batch_size={size} gradient_accumulation_steps={total // size} takes less memory for as many "
        "images per step; all checkpoints are intact"
    )

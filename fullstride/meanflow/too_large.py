"""A step that does not fit in memory: which batch would is tried out and told."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fullstride.errors import OutOfMemory, is_out_of_memory
from fullstride.meanflow import memory
from fullstride.meanflow.update import Update


def step_that_fits(
    update: Update, raw: Tensor, labels: Tensor, device: torch.device, before_trials: Callable[[], None]
) -> dict[str, Tensor]:
    """A step, or the error that says what to do about its size.

    Args:
        update: makes it.
        raw: micro-batches (k, b, ...).
        labels: theirs (k, b).
        device: where.
        before_trials: called if it does not fit, before smaller ones are tried, which may take minutes.

    Raises:
        OutOfMemory: with a batch that fits.

    """
    try:
        return update(raw, labels)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = memory.peak_memory(device)
        shape, dtype = raw.shape[2:], raw.dtype
        # The error's traceback holds the step's activations.
        error.__traceback__ = None
    before_trials()
    raise _advice(update, peak, shape, dtype, device)


def _advice(update: Update, peak: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> OutOfMemory:
    def trial(size: int) -> None:
        raw = torch.zeros(1, size, *shape, dtype=dtype, device=device)
        update.gradients(raw, torch.zeros(1, size, dtype=torch.long, device=device))

    batch, accumulation = update.config.data.batch_size, update.config.gradient_accumulation_steps
    count = update.processes.size
    fit = memory.fitting_batch(trial, batch // count, accumulation, device)
    fit = fit and replace(fit, batch_size=fit.batch_size * count)
    return OutOfMemory(memory.report(batch, accumulation, peak, fit, device))

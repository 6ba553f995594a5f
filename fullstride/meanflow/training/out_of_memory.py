"""A step that does not fit in memory: which batch would is tried out and told."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from fullstride.device import memory
from fullstride.errors import OutOfMemory, is_out_of_memory
from fullstride.meanflow.objective.loss import SAME_LOSS, MeanFlowLoss
from fullstride.meanflow.objective.times import meanflow_count
from fullstride.meanflow.training.step import Update


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
    count, loss = update.processes.size, update.loss
    own = batch // count
    given = (trial, own, accumulation, device)
    least = loss.least_batch
    fit = memory.fitting_batch(*given, lambda size: size >= least and _share(loss, size) == _share(loss, own))
    fit = fit or memory.fitting_batch(*given, lambda size: size >= least and 0 < _share(loss, size) < 1)
    told = {} if fit is None else {"step": _beside(loss, fit.batch_size, own)}
    fit = fit and replace(fit, batch_size=fit.batch_size * count)
    return OutOfMemory(memory.report(batch, accumulation, peak, fit, device, **told))


def _share(loss: MeanFlowLoss, size: int) -> Fraction:
    """Of a batch of that size the samples with r != t, whose number is rounded where they are counted."""
    return Fraction(meanflow_count(loss.ratio, size), size) if loss.split in SAME_LOSS else Fraction(loss.ratio)


def _beside(loss: MeanFlowLoss, size: int, given: int) -> str:
    """What the step of a smaller batch is beside that of the given one."""
    share, before = _share(loss, size), _share(loss, given)
    if share != before:
        return f"takes an optimizer step with r != t in {float(share):.1%} of the samples, {float(before):.1%} before"
    if loss.least_batch > 1:
        return "takes an optimizer step that is the same but for its weights, which compare samples of a part alone"
    return "takes the same optimizer step"

"""The records of an epoch's steps, a function of seed, epoch and attempt alone, and each process's share of them."""

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Split
from fullstride.step.torch import Processes


def _generator(seed: int, epoch: int, attempt: int, purpose: int) -> torch.Generator:
    # torch's generator on the CPU takes the low 32 bits of its seed: whatever is to count must reach them.
    mixed = seed * 1_000_003 + epoch + attempt * 2_654_435_761 + purpose * 1_540_483_477
    return torch.Generator().manual_seed(mixed % 2**32)


def epoch_order(
    n: int, *, steps: int, micro_batches: int, batch_size: int, seed: int, epoch: int, attempt: int = 0
) -> Int[Tensor, "steps k b"]:
    """The records of every step of an epoch, each at most once; a function of the arguments alone.

    Args:
        n: records to draw from.
        steps: optimizer steps of the epoch.
        micro_batches: k, forward passes a step.
        batch_size: b, records of a forward pass.
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        attempt: number that changes the order, so that a failure is not repeated.

    Returns:
        Indices from 0 to n - 1; those of a last incomplete batch are left out.

    Raises:
        ValueError: if there are too few records for so many steps.

    """
    taken = steps * micro_batches * batch_size
    if not 0 < taken <= n:
        raise ValueError(f"{steps} steps of {micro_batches} x {batch_size} records are {taken}, expected 1 to {n}")
    order = torch.randperm(n, generator=_generator(seed, epoch, attempt, purpose=0))
    return order[:taken].view(steps, micro_batches, batch_size)


def mirror_half(
    order: Int[Tensor, "steps k b"], n: int, *, seed: int, epoch: int, attempt: int = 0
) -> Int[Tensor, "steps k b"]:
    """The order with each record i replaced with probability 1/2 by n + i, itself mirrored; see `Split.flipped`."""
    generator = _generator(seed, epoch, attempt, purpose=1)
    return order + n * torch.randint(2, order.shape, generator=generator)


def epoch_orders(
    config: TrainConfig, split: Split, steps: int, epoch: int, attempt: int, processes: Processes
) -> Iterator[Int[Tensor, "steps own"]]:
    """The process's own records of each of an epoch's `steps`, from `epoch` on without end.

    They are every n-th of each micro-batch for each of n processes: together they see what one alone would see.
    """
    n = len(split)
    for each in itertools.count(epoch):
        order = epoch_order(
            n,
            steps=steps,
            micro_batches=config.gradient_accumulation_steps,
            batch_size=config.data.batch_size,
            seed=config.seed,
            epoch=each,
            attempt=attempt,
        )
        if config.data.hflip and split.flipped is not None:
            order = mirror_half(order, n, seed=config.seed, epoch=each, attempt=attempt)
        yield order[..., processes.rank :: processes.size].flatten(1)

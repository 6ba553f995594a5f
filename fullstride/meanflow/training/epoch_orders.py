"""The order of a run's records, epoch after epoch."""

import itertools
from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.order import epoch_order, mirror_half
from fullstride.step.torch import Processes


def orders(
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

"""The order of a run's records, epoch after epoch, from where the run stands on."""

import itertools
from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.order import epoch_order, mirror_half
from fullstride.meanflow.training.batch_share import share_of
from fullstride.meanflow.training.state import Position
from fullstride.step.torch import Processes


def orders(
    config: TrainConfig, split: Split, steps: int, position: Position, processes: Processes
) -> Iterator[Int[Tensor, "steps k own"]]:
    """The process's own records of each step, without end; the first epoch is the present one, from its beginning.

    Args:
        config: the run's.
        split: the records.
        steps: optimizer steps of an epoch.
        position: of the moment, whatever becomes of it before the first record is asked for.
        processes: that share the batches.

    """
    return _orders(config, split, steps, position.epoch, position.attempt, processes)


def _orders(
    config: TrainConfig, split: Split, steps: int, first: int, attempt: int, processes: Processes
) -> Iterator[Int[Tensor, "steps k own"]]:
    n = len(split)
    for epoch in itertools.count(first):
        order = epoch_order(
            n,
            steps=steps,
            micro_batches=config.gradient_accumulation_steps,
            batch_size=config.data.batch_size,
            seed=config.seed,
            epoch=epoch,
            attempt=attempt,
        )
        if config.data.hflip and split.flipped is not None:
            order = mirror_half(order, n, seed=config.seed, epoch=epoch, attempt=attempt)
        yield share_of(order, processes)

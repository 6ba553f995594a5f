"""A run's part on one of the processes that train it together: every micro-batch is shared out evenly."""

import torch
from jaxtyping import Int
from torch import Tensor

from fullstride import launched
from fullstride.errors import ConfigError
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.objective import SAME_LOSS
from fullstride.meanflow.times import meanflow_count
from fullstride.step.torch import Processes


def share_of(order: Int[Tensor, "steps k b"], processes: Processes) -> Int[Tensor, "steps k own"]:
    """Every n-th record of each micro-batch for each of n processes: together they see what one alone would see."""
    return order[..., processes.rank :: processes.size]


def check_launch(config: TrainConfig) -> None:
    """Check that the processes that were started are those that the configuration expects.

    Raises:
        ConfigError: if several processes would each train the run by themselves.

    """
    if config.distributed == "none" and launched.count() > 1:
        raise ConfigError(
            f"distributed=none in one of {launched.count()} processes: each would train the whole run; expected "
            "distributed=ddp or fsdp, or one process"
        )


def check_share(config: TrainConfig, processes: Processes, device: torch.device) -> None:
    """Check that the run can be shared out with nothing changed but the order of sums.

    Raises:
        ConfigError: for a device that has not been checked, or a batch that cannot be divided.

    """
    if config.distributed == "none":
        return
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"distributed={config.distributed} device={device.type}: expected device=cuda or cpu, between which "
            "collectives have been checked"
        )
    batch, count = config.data.batch_size, processes.size
    if batch % count:
        raise ConfigError(
            f"data.batch_size={batch} over {count} processes: expected a multiple of {count}; it is the batch of all "
            f"of them together, such as {batch + -batch % count}"
        )
    _check_ratio(config, count)


def _check_ratio(config: TrainConfig, count: int) -> None:
    """The samples with r != t are a rounded share of each forward pass's: the parts must add up to the whole."""
    batch, ratio = config.data.batch_size, config.loss.meanflow_ratio
    whole, parts = meanflow_count(ratio, batch), count * meanflow_count(ratio, batch // count)
    if config.loss.split in SAME_LOSS and whole != parts:
        raise ConfigError(
            f"data.batch_size={batch} over {count} processes: loss.meanflow_ratio={ratio} is {parts} samples there and "
            f"{whole} in one process; choose a batch size of which each process's part times the ratio is whole"
        )

"""Data parallelism of a run: every micro-batch is divided evenly among the processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.objective.loss import SAME_LOSS
from fullstride.meanflow.objective.times import meanflow_count
from fullstride.meanflow.objective.weighting import weighting_of
from fullstride.meanflow.sampling.samplers import SampleResult
from fullstride.process import torchrun as launched
from fullstride.step.torch import SINGLE, Processes, join_processes


@contextmanager
def all_started(device: str) -> Iterator[Processes]:
    """The processes that torchrun has started, for a device's name, or this one alone."""
    if launched.world_size() == 1:
        yield SINGLE
        return
    with join_processes(resolve_device(device).type, "nccl") as processes:
        yield processes


def in_parts(make: Callable[[range], SampleResult], num: int, processes: Processes) -> SampleResult | None:
    """Generate images in parts, one for each process; returns all on the first one and None on the others; collective.

    Args:
        make: function that returns the images of given indices, of which there is at least one.
        num: total number of images.
        processes: the processes that share them.

    Raises:
        PeerError: with the reason, if another process cannot make its part.

    """
    own = processes.part(num)
    # What is wrong with a number below 1 `make` says.
    made = processes.agreed(lambda: make(own) if own or num < 1 else None)
    parts = [part for part in processes.collect(made) if part is not None]
    if not parts:
        return None
    evaluations = sum(part.nfe * len(part.images) for part in parts)
    return SampleResult(torch.cat([part.images for part in parts]), evaluations / num)


def check_parts(config: TrainConfig, count: int, device: str) -> None:
    """Check that the run can be shared out with nothing changed but the order of sums.

    Args:
        config: the run's configuration.
        count: number of the processes that will train it.
        device: the device's type, or its name in the configuration; `auto` may become any and is accepted.

    Raises:
        ConfigError: for a device whose collectives are not tested, or a batch that cannot be divided.

    """
    if config.distributed == "none":
        return
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"distributed={config.distributed} device={device}: expected device=cuda or cpu, the devices whose "
            "collectives are tested"
        )
    batch, ratio = config.data.batch_size, config.loss.meanflow_ratio
    if batch % count:
        raise ConfigError(
            f"data.batch_size={batch} over {count} processes: expected a multiple of {count}; this is the global "
            f"batch size, such as {batch + -batch % count}"
        )
    least = weighting_of(config.loss.weighting).least_batch
    if batch // count < least:
        raise ConfigError(
            f"data.batch_size={batch} over {count} processes: loss.weighting={config.loss.weighting} expects at least "
            f"{least} in each; raise data.batch_size, or use loss.weighting=adaptive"
        )
    # The samples with r != t are a rounded share of each forward pass's: the parts must add up to the whole.
    whole, parts = meanflow_count(ratio, batch), count * meanflow_count(ratio, batch // count)
    if config.loss.split in SAME_LOSS and whole != parts:
        raise ConfigError(
            f"data.batch_size={batch} over {count} processes: loss.meanflow_ratio={ratio} is {parts} samples over the "
            f"processes and {whole} in one process; choose a batch size for which each process's share times the ratio "
            "is a whole number"
        )

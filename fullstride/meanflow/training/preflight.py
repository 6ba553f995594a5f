"""Every check of a run, made before anything of it is, and without leaving anything."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fullstride.device.precision import check_precision, of_process
from fullstride.device.select import resolve_device
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.config.validation import validate
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.check_records import check_records
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources.known_files import known_files
from fullstride.meanflow.evaluation.preflight import check_evaluation, check_generating
from fullstride.meanflow.training.batch_share import check_parts
from fullstride.meanflow.training.build import steps_per_epoch
from fullstride.meanflow.training.trackers import check_tracker
from fullstride.step.torch import ALONE, Processes


@dataclass(frozen=True)
class Plan:
    """Facts about a run that can begin.

    Attributes:
        device: that it trains on.
        data: that it trains on and is held against.
        precision: of the process's fp32 products.
        steps: optimizer steps of an epoch.

    """

    device: torch.device
    data: Dataset
    precision: str
    steps: int


def preflight(config: TrainConfig, processes: Processes = ALONE) -> Plan:
    """Check that a run can begin; nothing of an earlier one is touched. Collective.

    Raises:
        ConfigError: for settings that cannot work together, on this device, with these data or without a package.
        ReadError: if the data cannot be read for now.

    """
    validate(config)
    device = resolve_device(config.device)
    check_parts(config, processes.size, device.type)
    precision = of_process(config.precision, config.loss.jvp_precision)
    check_precision(precision, device)
    check_tracker(config.track)
    if config.eval_every:
        check_generating(config.evaluation, device)
    check_holdout(config.data)  # no part of loading, as earlier runs that gave one can be evaluated
    data = _loaded(config, processes)
    check_evaluation(data, config.evaluation, due=config.eval_every > 0)
    return Plan(device, data, precision, steps_per_epoch(config, len(data.train)))


def _loaded(config: TrainConfig, processes: Processes) -> Dataset:
    if config.resume and config.data.path:  # it was there: where it is not, its disk may be away
        place = Path(config.data.path).expanduser()
        read_again(place.stat, place.__str__)
    folder = Path(config.output_dir) / config.run_name
    data = load_data(config.data, known_files(folder) if config.resume else None)
    if config.data.check:
        processes.led(lambda: check_records(data, config.data.workers, config.data.skip_damaged))
    return data

"""Every check of a run, made before anything else, and without leaving anything behind."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from fullstride.device.precision import check_precision, process_precision
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError, Damaged
from fullstride.meanflow.config.overrides import validate
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.dataset import Dataset, Store, read_record
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources.known_files import known_files
from fullstride.meanflow.evaluation.preflight import check_evaluation, check_generating
from fullstride.meanflow.training.batch_share import check_parts
from fullstride.meanflow.training.build import steps_per_epoch
from fullstride.meanflow.training.teacher import check_teacher
from fullstride.runs.atomic_files import note
from fullstride.runs.folder import folder_of
from fullstride.runs.trackers.tracker import check_tracker
from fullstride.step.torch import SINGLE, Processes


def preflight(config: TrainConfig, processes: Processes = SINGLE) -> tuple[Dataset, int]:
    """Check that a run can begin; nothing of an earlier one is touched. Collective.

    Returns:
        The data set that it trains on and is compared with, and the number of optimizer steps of an epoch.

    Raises:
        ConfigError: for settings that cannot work together, on this device, with these data or without a package.
        ReadError: if the data cannot be read for now.

    """
    validate(config)
    device = resolve_device(config.device)
    check_parts(config, processes.size, device.type)
    check_precision(process_precision(config.precision, config.loss.jvp_precision), device)
    check_tracker(config.track)
    if config.eval_every:
        check_generating(config.evaluation, device)
    check_holdout(config.data)  # no part of loading, as earlier runs that gave one can be evaluated
    if config.resume and config.data.path:  # it was there: where it is not, its disk may be away
        read_again(config.data.place.stat, config.data.place.__str__)
    data = load_data(config.data, known_files(folder_of(config)) if config.resume else None)
    if config.data.check:
        processes.led(lambda: check_records(data, config.data.workers, config.data.skip_damaged))
    check_evaluation(data, config.evaluation, due=config.eval_every > 0)
    check_teacher(config, data)
    return data, steps_per_epoch(config, len(data.train))


def check_records(data: Dataset, threads: int, allowed: int) -> None:
    """Read every record of a data set once, each fault told on stderr.

    Args:
        data: a data set that is read from files; one in memory has been read already.
        threads: number of reading threads.
        allowed: allowed number of damaged records.

    Raises:
        ConfigError: if more are damaged, or one is not like the others.

    """

    def fault(store: Store, index: int) -> ConfigError | None:
        try:
            read_record(store, index)
        except ConfigError as error:
            return error

    stores = [split.records for split in (data.train, data.test) if not isinstance(split.records, Tensor)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        faults = [found for store in stores for found in pool.map(partial(fault, store), range(len(store))) if found]
    for found in faults:
        note(str(found))
    count = sum(map(len, stores))
    note(f"data.check=true: {count:,} records read, {len(faults):,} of them faulty")
    if len(faults) > allowed or not all(isinstance(found, Damaged) for found in faults):
        advice = f"replace or delete them, or skip damaged ones with data.skip_damaged={len(faults)}"
        raise ConfigError(f"{len(faults)} of {count} records cannot be used, such as {faults[0]}; {advice}")

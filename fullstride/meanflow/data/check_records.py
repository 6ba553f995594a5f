"""A check of all records before a run begins."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from fullstride.errors import ConfigError, Damaged
from fullstride.meanflow.data.dataset import Dataset, Store, read_record
from fullstride.runs.atomic_files import note


def check_records(data: Dataset, threads: int, allowed: int) -> None:
    """Read every record of a data set once, each fault told on stderr.

    Args:
        data: that is read from files; of one in memory nothing is left to read.
        threads: at a time.
        allowed: damaged ones that may be.

    Raises:
        ConfigError: if more are damaged, or one is not like the others.

    """
    stores = [split.records for split in (data.train, data.test) if not isinstance(split.records, Tensor)]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        faults = [fault for store in stores for fault in pool.map(partial(_fault, store), range(len(store))) if fault]
    for fault in faults:
        note(str(fault))
    count = sum(map(len, stores))
    note(f"data.check=true: {count:,} records read, {len(faults):,} of them with a fault")
    if len(faults) > allowed or not all(isinstance(fault, Damaged) for fault in faults):
        advice = f"replace or delete them, or pass over damaged ones by data.skip_damaged={len(faults)}"
        raise ConfigError(f"{len(faults)} of {count} records cannot be used, such as {faults[0]}; {advice}")


def _fault(store: Store, index: int) -> ConfigError | None:
    try:
        read_record(store, index)
    except ConfigError as error:
        return error

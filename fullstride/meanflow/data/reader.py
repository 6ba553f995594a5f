"""Records of stores, stacked a step at a time by worker processes, in the order asked for."""

import multiprocessing
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fullstride.errors import ConfigError, ReadError
from fullstride.meanflow.data.dataset import Store, read_records
from fullstride.meanflow.data.reading import SkippedRecords

# As torch has it, of a worker that is gone and of one that a signal killed.
DEAD_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
# Steps that each worker reads ahead.
PREFETCH = 2
# Workers are forked from a process that has no CUDA and no locks of ours to inherit, which a fork of the training
# process would, and which has imported torch already, unlike a new process for each.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@dataclass(frozen=True)
class _Failure:
    """An error on its way from a worker: torch would wrap the worker's traceback into its one line."""

    kind: type[ConfigError | ReadError]
    message: str


class _Records(Dataset):
    """Source that a worker reads from, as `read_records`."""

    def __init__(self, stores: list[Store], labels: Tensor | None):
        self.stores, self.labels = stores, labels

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, list[str]] | _Failure:
        try:
            # In a worker this stacks in shared memory, which spares a copy.
            return read_records(self.stores, indices, self.labels)
        except (ConfigError, ReadError) as error:
            return _Failure(type(error), str(error))


class _Steps:
    """The batch sampler: lists of indices, of orders that change under the same workers."""

    def __init__(self) -> None:
        self.orders: Iterator[Tensor] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        for order in self.orders:
            yield from (step.flatten().tolist() for step in order)


def _as_read(step: Any) -> Any:
    return step


def _start_worker(_: int) -> None:
    # Control-C reaches every process of the terminal; the main one decides what still has to be read.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _from_living(steps: Iterator[Any], workers: int) -> Iterator[Any]:
    """The steps; a worker that has died is one line."""
    while True:
        try:
            step = next(steps)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            found = DEAD_WORKER.search(str(error))
            # What a store raised in a worker torch raises again, and says so first. Any other error of this kind is of
            # a worker that died as it handed over a step.
            stores = str(error).startswith("Caught ") or not workers
            if not found and (isinstance(error, RuntimeError) or stores):
                raise
            who = f"the data's worker process {found[1]}" if found else "a worker process of the data"
            raise ReadError(
                f"{who} has died, killed or out of memory, or because its disk "
                "went away during a read; fewer data.workers use less memory"
            ) from None
        yield step


def _processes(workers: int) -> dict[str, Any]:
    if not workers:
        return {}
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload([__name__])
    return {"multiprocessing_context": context, "prefetch_factor": PREFETCH, "persistent_workers": True}


class StepReader:
    """Reads orders of indices from stores, with the same workers every time."""

    def __init__(
        self,
        stores: list[Store],
        workers: int,
        pinned: bool,
        labels: Tensor | None = None,
        skips: SkippedRecords | None = None,
    ):
        """Make the reader.

        Args:
            stores: stores of the same records, in one form each.
            workers: number of reading processes.
            pinned: whether every step is copied to page-locked memory.
            labels: labels of the records, by which damaged ones are replaced.
            skips: counter of the damaged records.

        Raises:
            ConfigError: if `workers` is negative.

        """
        if workers < 0:
            raise ConfigError(f"data.workers={workers}: expected 0 (read in the main process) or more")
        self._steps, self._skips = _Steps(), skips
        # No timeout: with one, torch looks for dead workers only when it has run out, without it every five seconds;
        # and a worker that waits for a slow disk is to be waited for. A generator of its own: torch draws a seed for
        # each iteration, which must not move the training's random numbers.
        self._loader = DataLoader(
            _Records(stores, labels if skips else None),
            batch_sampler=self._steps,
            num_workers=workers,
            collate_fn=_as_read,
            pin_memory=pinned,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),
            **_processes(workers),
        )

    def read(self, orders: Iterator[Tensor]) -> Iterator[Tensor]:
        """The records of each step of each order, (k b, ...); reading starts at once and goes ahead.

        Raises:
            ConfigError: from a store.
            ReadError: if a record cannot be read for now, or a worker dies.

        """
        self._steps.orders = orders
        return map(self._whole, _from_living(iter(self._loader), self._loader.num_workers))

    def _whole(self, step: tuple[Tensor, list[str]] | _Failure) -> Tensor:
        if isinstance(step, _Failure):
            raise step.kind(step.message)
        records, damaged = step
        if self._skips:
            self._skips.add(damaged)
        return records

    def close(self) -> None:
        """End the workers; reading again starts new ones.

        Python's exit would wait five seconds for each worker that nobody ended.
        """
        running = vars(self._loader).get("_iterator")
        if running is not None:
            running._shutdown_workers()
            self._loader._iterator = None

"""Batches prefetched to the device: by indexing there if in memory, by worker processes if in a store.

Which records make up a step is decided by an order of indices alone, drawn in the main process: neither the number of
workers nor the step that a run goes on from changes what comes.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fullstride.errors import ConfigError, ReadError
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.reader import StepReader
from fullstride.step.torch import prefetch


class RecordBatch(NamedTuple):
    """Records of one optimizer step, on the device.

    Attributes:
        raw: records as stored; the step's index shape, then a record's shape.
        labels: the label of each record.

    """

    raw: Tensor
    labels: Tensor


class Prefetcher(Iterator[RecordBatch]):
    """An iterator over batches, of which the next one can be read before it is needed.

    Attributes:
        error: the error of reading the next batch, if `read` met one.

    """

    def __init__(self, batches: Iterator[RecordBatch]):
        """Nothing is read yet."""
        self._batches = batches
        self._batch: RecordBatch | None = None
        self.error: ConfigError | ReadError | None = None

    def __next__(self) -> RecordBatch:
        """The next batch.

        Raises:
            ConfigError, ReadError: if it cannot be read.

        """
        batch, self._batch = self._batch, None
        return next(self._batches) if batch is None else batch

    def read(self) -> None:
        """Read the next batch, or keep the error that prevents it."""
        try:
            self._batch = next(self)
        except (ConfigError, ReadError) as error:
            self.error = error


class Loader(AbstractContextManager["Loader"]):
    """The batches of one split, any number of times, one iteration at a time; `with` ends its workers."""

    def __init__(self, split: Split, device: torch.device, workers: int = 0):
        """Make the loader; a tensor of records moves to the device, workers start with the first iteration.

        Args:
            split: the split to read.
            device: the device of the batches.
            workers: processes that read a store, 0 to read in this one; a tensor of records needs none.

        Raises:
            ConfigError: if `workers` is negative.

        """
        self.device = device
        self.labels = split.labels.to(device)
        self._count = len(split) * (1 if split.flipped is None else 2)
        if isinstance(split.records, Tensor):
            self._source = split.records.to(device)
        else:
            stores = [split.records, *([] if split.flipped is None else [split.flipped])]
            self._source = StepReader(stores, workers, device.type == "cuda", split.labels, split.skips)

    def close(self) -> None:
        """End the workers, if there are any; a later iteration starts new ones."""
        if isinstance(self._source, StepReader):
            self._source.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def batches(self, orders: Iterable[Int[Tensor, "steps *b"]], start: int = 0) -> Iterator[RecordBatch]:
        """The steps of one order after another; workers read ahead across their borders.

        Args:
            orders: record indices of each epoch, on the CPU, a row for each step; may be a lazy iterable.
            start: the step of the first order to begin with; what follows is what would have followed anyway.

        Returns:
            A batch a step. An iteration that is left unfinished ends when the next one begins.

        Raises:
            ValueError: for an index or a start that is not there.
            ConfigError: from a store.
            ReadError: if a record cannot be read for now; if a worker dies, some seconds later.

        """
        checked = self._checked(orders, start)
        if isinstance(self._source, Tensor):
            records = self._source
            steps = (step for order in checked for step in self._on_device(order))
            return (RecordBatch(records[step], self.labels[step]) for step in steps)
        ahead, behind = itertools.tee(checked)
        # Copied to the device on CUDA one step ahead, beside the computation.
        raws = prefetch(self._source.read(ahead), self.device)
        each = (x for order in behind for x in self.labels[self._on_device(order % len(self.labels))])
        return (RecordBatch(next(raws).unflatten(0, labels.shape), labels) for labels in each)

    def _checked(self, orders: Iterable[Tensor], start: int) -> Iterator[Tensor]:
        for order in orders:
            low, high = order.aminmax()
            if low < 0 or high >= self._count:
                raise ValueError(f"indices span {int(low)} to {int(high)}, expected 0 to {self._count - 1}")
            if not 0 <= start <= len(order):
                raise ValueError(f"start is {start}, expected 0 to {len(order)}, the number of steps")
            yield order[start:]
            start = 0

    def _on_device(self, order: Tensor) -> Tensor:
        """The one copy of indices an epoch; pinned, so that the host does not wait for the device."""
        cuda = self.device.type == "cuda"
        return (order.pin_memory() if cuda else order).to(self.device, non_blocking=cuda)

"""Batches one at a time, of which the next one can be read before it is needed."""

from collections.abc import Iterator

from fullstride.errors import ConfigError, ReadError
from fullstride.meanflow.data.loader import Batch


class Ahead(Iterator[Batch]):
    """An iterator over batches.

    Attributes:
        error: why the next batch cannot be read, if `read` found so.

    """

    def __init__(self, batches: Iterator[Batch]):
        """Nothing is read yet."""
        self._batches = batches
        self._batch: Batch | None = None
        self.error: ConfigError | ReadError | None = None

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            ConfigError, ReadError: if it cannot be read.

        """
        batch, self._batch = self._batch, None
        return next(self._batches) if batch is None else batch

    def read(self) -> None:
        """Have the next batch ready, or know why it cannot be had."""
        try:
            self._batch = next(self)
        except (ConfigError, ReadError) as error:
            self.error = error

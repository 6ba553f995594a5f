"""Batches in an order that the seed and the step alone decide, made ahead on a thread."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from fullstride.bert.data.batch import Batch, mask_tokens
from fullstride.bert.data.rows import TokenRows

T = TypeVar("T")

ORDER, HIDING = 0, 1  # purposes of random numbers
AHEAD = 4


class Batches:
    """The batch of any step; there is no state, so that a run can resume from any step.

    Rows come in a new order in each epoch, one epoch after another without a gap, and what of them is hidden is drawn
    anew for each step.
    """

    def __init__(self, rows: TokenRows, batch_size: int, seed: int, fraction: float, *, whole_words: bool = False):
        """Keep the rows.

        Args:
            rows: at least one.
            batch_size: rows of a batch.
            seed: seed of order and masks.
            fraction: share of the tokens to predict.
            whole_words: whether words are hidden as a whole, as in `mask_tokens`.

        """
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.fraction, self.whole_words = fraction, whole_words
        self._epochs: dict[int, Any] = {}

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        rng = np.random.default_rng([self.seed, HIDING, step])
        return mask_tokens(self.rows[self.indices(step)], rng, self.fraction, whole_words=self.whole_words)

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Indices of a step's rows."""
        place = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epoch, within = np.divmod(place, len(self.rows))
        return np.concatenate([self._order(int(e))[within[epoch == e]] for e in np.unique(epoch)])

    def _order(self, epoch: int) -> Any:
        if epoch not in self._epochs:
            # The present epoch and the one before it are all that a batch of consecutive places asks for.
            self._epochs = {e: order for e, order in self._epochs.items() if e == epoch - 1}
            rng = np.random.default_rng([self.seed, ORDER, epoch])
            self._epochs[epoch] = rng.permutation(len(self.rows))
        return self._epochs[epoch]


@contextmanager
def prefetched(make: Callable[[int], T], start: int, end: int, size: int = AHEAD) -> Iterator[Iterator[T]]:
    """make(start), ..., make(end - 1), made on a thread up to `size` ahead; its errors are raised at the consumer.

    Args:
        make: function called in order, on the thread.
        start: the first number.
        end: the one after the last.
        size: largest number of results that wait to be read.

    """
    pool = ThreadPoolExecutor(1, "batches")
    numbers = iter(range(start, end))
    made = deque(pool.submit(make, number) for number in itertools.islice(numbers, size + 1))  # one is in hand

    def read() -> Iterator[T]:
        while made:
            item = made.popleft().result()
            made.extend(pool.submit(make, number) for number in itertools.islice(numbers, 1))
            yield item

    try:
        yield read()
    finally:
        pool.shutdown(cancel_futures=True)

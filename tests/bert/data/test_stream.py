import threading
import time

import numpy as np
import pytest

from fullstride.bert.data.rows import rows_of
from fullstride.bert.data.stream import Batches, prefetched
from tests.bert.data.texts import corpus, tokenizer

ROWS = rows_of(corpus(), tokenizer(), 24)


def test_an_epoch_has_each_row_once_and_the_next_another_order():
    size, n = 7, len(ROWS)
    batches = Batches(ROWS, size, 3, 0.15)
    order = np.concatenate([batches.indices(step) for step in range(2 * n // size + 1)])
    assert n % size
    assert sorted(order[:n]) == sorted(order[n : 2 * n]) == list(range(n))
    assert (order[:n] != order[n : 2 * n]).any()


def test_a_batch_is_a_function_of_seed_and_step_alone():
    batches = Batches(ROWS, 5, 3, 0.15, whole_words=True)
    steps = [40, 3, 41, 0, 12]
    made = {step: batches.at(step) for step in steps}
    for step in reversed(steps):
        for a, b in zip(made[step], Batches(ROWS, 5, 3, 0.15, whole_words=True).at(step), strict=True):
            if a is not None:
                np.testing.assert_array_equal(a, b)
    assert (made[0].tokens != Batches(ROWS, 5, 4, 0.15).at(0).tokens).any()


def test_masks_are_drawn_anew_in_each_epoch():
    batches = Batches(ROWS, len(ROWS), 0, 0.15)
    hidden = []
    for step in range(2):
        batch, order = batches.at(step), batches.indices(step)
        places = np.zeros(ROWS.tokens.shape, bool)
        places[order[:, None], batch.masked] = batch.counted
        hidden.append(places)
    assert (hidden[0] != hidden[1]).any()


def test_a_batch_may_span_several_epochs():
    order = Batches(ROWS, 3 * len(ROWS), 0, 0.15).indices(1)
    assert sorted(order) == sorted(np.repeat(np.arange(len(ROWS)), 3))


def test_what_is_made_ahead_comes_in_order_and_the_thread_ends():
    before = threading.active_count()
    with prefetched(lambda i: i * i, 3, 9) as made:
        assert list(made) == [9, 16, 25, 36, 49, 64]
    with prefetched(lambda i: i, 0, 10**9, size=2) as endless:
        assert next(endless) == 0
    assert threading.active_count() == before


def test_only_so_many_are_made_ahead():
    made = []
    with prefetched(lambda i: made.append(i), 0, 100, size=3) as items:
        next(items)
        deadline = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # One was taken, three wait, one is in hand.
        assert len(made) == 5


def test_an_error_is_raised_where_it_is_read():
    def make(i: int) -> int:
        if i == 2:
            raise OSError("disk")
        return i

    with prefetched(make, 0, 5) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(OSError, match="disk"):
            next(items)

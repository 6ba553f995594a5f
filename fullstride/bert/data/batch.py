"""Batches of masked language modelling: rows with tokens hidden by BERT's rule, or each token hidden in turn."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fullstride.bert.data.rows import TokenRows
from fullstride.bert.model.config import BertConfig

# Share of the tokens that are predicted (arXiv:1810.04805, section 3.1).
MASKED = 0.15


class Batch(NamedTuple):
    """Rows of tokens, some of which are to be predicted; every row has room for as many predictions.

    Attributes:
        tokens: token numbers, those to predict hidden already.
        masked: places in the row of the tokens to predict.
        labels: the original tokens at those places.
        counted: mask of the p places that are predictions and not padding.
        segments: a number for each token of packed rows; see `Bert`.
        lengths: number of tokens of each row before its padding.

    """

    tokens: Int[Array, "b t"]
    masked: Int[Array, "b p"]
    labels: Int[Array, "b p"]
    counted: Bool[Array, "b p"]
    segments: Int[Array, "b t"] | None = None
    lengths: Int[Array, " b"] | None = None


def predictions(length: int, fraction: float = MASKED) -> int:
    """Number of predictions that a row of so many tokens has room for."""
    return max(1, round(fraction * length))


def synthetic_batch(config: BertConfig, batch: int, length: int, key: PRNGKeyArray) -> Batch:
    """Random tokens in full rows, for measuring.

    Args:
        config: the model's configuration.
        batch: number of rows.
        length: number of tokens of a row.
        key: random key of the tokens and of the places to predict.

    """
    tokens, places, labels = jax.random.split(key, 3)
    count = predictions(length)
    ranked = jnp.argsort(jax.random.uniform(places, (batch, length)), axis=1)
    return Batch(
        tokens=jax.random.randint(tokens, (batch, length), 0, config.vocab_size, jnp.int32),
        masked=jnp.sort(ranked[:, :count], axis=1).astype(jnp.int32),
        labels=jax.random.randint(labels, (batch, count), 0, config.vocab_size, jnp.int32),
        counted=jnp.ones((batch, count), bool),
    )


# Of the tokens to predict, so many are hidden behind [MASK], so many more replaced by any other token; the rest stays.
HIDDEN, REPLACED = 0.8, 0.1


def mask_tokens(
    rows: TokenRows, rng: np.random.Generator, fraction: float = MASKED, *, whole_words: bool = False
) -> Batch:
    """Rows with tokens chosen to be predicted: 80 % hidden, 10 % replaced by a random one, 10 % as they are.

    Args:
        rows: rows of one batch.
        rng: random generator, which alone determines the choice.
        fraction: share of each row's tokens, rounded, at least one.
        whole_words: choose words, not tokens, in a random order: each that still fits into that number, as BERT's own
            code does; a row none of whose words fits predicts nothing.

    """
    room = predictions(rows.tokens.shape[1], fraction)
    scores = rng.random(rows.tokens.shape, np.float32)
    if whole_words:
        scores = np.take_along_axis(scores, word_starts(rows), 1)
    scores[~rows.hideable] = np.inf
    order = np.argsort(scores, axis=1, kind="stable")
    wanted = np.minimum(np.maximum(np.rint(fraction * rows.hideable.sum(1)), 1), room)[:, None]
    if whole_words:
        order, counted = _whole(order, np.take_along_axis(scores, order, 1), wanted, room)
    else:
        order = order[:, :room]
        counted = (np.arange(room) < wanted) & np.isfinite(np.take_along_axis(scores, order, 1))
    # Filling points at the row's first token.
    places = np.where(counted, order, 0)
    draw, ordinary = rng.random(places.shape), rows.vocabulary.ordinary
    return _hidden(rows, places, counted, draw, ordinary[rng.integers(0, len(ordinary), places.shape)])


def word_starts(rows: TokenRows) -> Int[np.ndarray, "rows length"]:
    """Index of the first token of each token's word."""
    place = np.broadcast_to(np.arange(rows.tokens.shape[1]), rows.tokens.shape)
    begins = ~(rows.vocabulary.inside[rows.tokens] & rows.hideable)
    # What a cut separated from its word begins one.
    begins[:, 1:] |= ~rows.hideable[:, :-1]
    return np.maximum.accumulate(np.where(begins, place, 0), axis=1)


def _whole(
    order: Int[np.ndarray, "b t"], scores: Float[np.ndarray, "b t"], wanted: Float[np.ndarray, "b 1"], room: int
) -> tuple[Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"]]:
    """Tokens of the words that fit, in the order of the scores (one for each word), and a mask of those tokens."""
    real, (rows, length) = np.isfinite(scores), order.shape
    word = np.zeros(order.shape, np.int64)  # equal scores are one
    np.cumsum(scores[:, 1:] != scores[:, :-1], axis=1, out=word[:, 1:])
    flat = (np.arange(rows)[:, None] * length + word)[real]
    sizes = np.bincount(flat, minlength=rows * length).reshape(rows, length)
    fits, left = np.zeros_like(real), wanted[:, 0].copy()
    for number in range(int(word[real].max(initial=-1)) + 1):
        fits[:, number] = sizes[:, number] <= left
        left -= np.where(fits[:, number], sizes[:, number], 0)
        if not left.any():
            break
    chosen = np.take_along_axis(fits, word, 1) & real
    first = np.argsort(~chosen, axis=1, kind="stable")[:, :room]
    return np.take_along_axis(order, first, 1), np.take_along_axis(chosen, first, 1)


def in_turn(rows: TokenRows, rng: np.random.Generator, fraction: float = MASKED) -> Iterator[Batch]:
    """The rows round(1 / fraction) times, each token hidden behind [MASK] exactly once.

    Which tokens are hidden together is drawn for each row; a row's times differ by one token at most.
    """
    times = max(1, round(1 / fraction))
    scores = np.where(rows.hideable, rng.random(rows.tokens.shape), np.inf)
    order = np.argsort(scores, axis=1, kind="stable")
    counts = rows.hideable.sum(1, keepdims=True)
    room = -(-rows.tokens.shape[1] // times)
    for time in range(times):
        rank = np.arange(room)[None] * times + time
        counted = rank < counts
        places = np.where(counted, np.take_along_axis(order, np.minimum(rank, order.shape[1] - 1), 1), 0)
        yield _hidden(rows, places, counted, np.zeros(places.shape), places)


def _hidden(rows: TokenRows, places: np.ndarray, counted: np.ndarray, draw: np.ndarray, other: np.ndarray) -> Batch:
    """A batch whose tokens at `places` are hidden, replaced by `other` or left, as `draw` in [0, 1) says."""
    labels = np.take_along_axis(rows.tokens, places, 1)
    shown = np.where(draw < HIDDEN, rows.vocabulary.mask, np.where(draw < HIDDEN + REPLACED, other, labels))
    tokens = rows.tokens.copy()
    row = np.broadcast_to(np.arange(len(tokens))[:, None], places.shape)
    tokens[row[counted], places[counted]] = shown[counted]
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "masked": places.astype(np.int32),
        "labels": labels.astype(np.int32),
        "counted": counted,
    }
    # Padding at the end of rows is what fused attention takes for less than a mask.
    lengths = (rows.segments > 0).sum(1, dtype=np.int32)
    arrays |= {"segments": rows.segments} if rows.packed else {"lengths": lengths}
    return Batch(**arrays)

"""What a step of masked language modelling is given."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fullstride.bert.model.config import BertConfig

# Share of the tokens that are predicted (arXiv:1810.04805, section 3.1).
MASKED = 0.15


class Batch(NamedTuple):
    """Rows of tokens, some of which are to be predicted; every row has room for as many predictions.

    Attributes:
        tokens: numbers of the tokens, what is to be predicted being hidden already.
        masked: places in the row of what is to be predicted.
        labels: the tokens that were there.
        counted: which of the p are predictions and not filling.
        segments: a number for each token of packed rows; see `Bert`.
        lengths: tokens of each row that are no padding.

    """

    tokens: Int[Array, "b t"]
    masked: Int[Array, "b p"]
    labels: Int[Array, "b p"]
    counted: Bool[Array, "b p"]
    segments: Int[Array, "b t"] | None = None
    lengths: Int[Array, " b"] | None = None


def predictions(length: int, fraction: float = MASKED) -> int:
    """How many predictions a row of so many tokens has room for."""
    return max(1, round(fraction * length))


def synthetic_batch(config: BertConfig, batch: int, length: int, key: PRNGKeyArray) -> Batch:
    """Random tokens in full rows, for measuring.

    Args:
        config: the model's.
        batch: rows.
        length: tokens of a row.
        key: of the tokens and of the places to predict.

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

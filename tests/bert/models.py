"""BERTs of odd sizes, awake in every weight, and transformers' of the same."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fullstride.bert.data.batch import Batch
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.loss import mlm_loss
from fullstride.step.jax.loss import values

ODD = BertConfig(
    vocab_size=97,
    hidden_size=36,
    layers=2,
    heads=3,
    intermediate_size=50,
    max_length=41,
    types=3,
    hidden_dropout=0.0,
    pooler=True,
)


def awake(config: BertConfig, seed: int, std: float = 0.3) -> Bert:
    """A model none of whose weights are 0 or 1, so that each of them matters."""
    rng = np.random.default_rng(seed)
    model = eqx.filter_eval_shape(Bert, config, key=jax.random.key(0))
    # Vectors around 0.7, so that norms hand on what they are given.
    return jax.tree.map(
        lambda x: x if isinstance(x, bool) else _array(rng.normal(0.7 if x.ndim == 1 else 0, std, x.shape)), model
    )


def _array(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


# Compiled as a whole, which takes a fraction of what compiling operation by operation does.
run = eqx.filter_jit(lambda model, tokens, **given: model(tokens, **given))
scores = eqx.filter_jit(lambda model, hidden: model.logits(hidden))
loss_of = eqx.filter_jit(lambda model, batch: values(mlm_loss(model, batch)))


def ids(seed: int, shape: tuple[int, ...], below: int = ODD.vocab_size) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def batch_of(seed: int, config: BertConfig, rows: int = 3, length: int = 17, places: int = 4) -> Batch:
    rng = np.random.default_rng(seed)
    masked = np.stack([rng.permutation(length)[:places] for _ in range(rows)])
    return Batch(
        tokens=ids(seed, (rows, length), config.vocab_size),
        masked=jnp.asarray(masked, jnp.int32),
        labels=ids(seed + 1, (rows, places), config.vocab_size),
        counted=jnp.asarray(rng.random((rows, places)) < 0.7).at[0, 0].set(True),
    )

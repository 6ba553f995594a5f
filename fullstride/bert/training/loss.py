"""The loss of masked language modelling: cross entropy, in fp32, of the tokens that were hidden."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fullstride.bert.data.batch import Batch
from fullstride.bert.model.bert import Bert
from fullstride.step.jax import Mean


def predicted(
    model: Bert, batch: Batch, key: PRNGKeyArray | None = None
) -> tuple[Float[Array, "b p"], Bool[Array, "b p"]]:
    """Run the model; scores over the vocabulary are computed only where a token is to be predicted.

    Returns:
        -log p of the tokens that were there, and whether no token was held likelier; 0 and False where nothing is
        counted.

    """
    hidden = model(batch.tokens, segments=batch.segments, lengths=batch.lengths, key=key)
    at = jnp.take_along_axis(hidden, batch.masked[:, :, None], axis=1, mode="clip")
    logits = model.logits(at)
    # By comparison: it fuses with the other reductions, and its gradient is no scatter.
    one = jax.lax.broadcasted_iota(batch.labels.dtype, logits.shape, 2) == batch.labels[:, :, None]
    score = jnp.where(one, logits, jnp.zeros_like(logits)).sum(-1)
    nats = jax.nn.logsumexp(logits, axis=-1) - score
    right = (score >= logits.max(-1)) & batch.counted
    return jnp.where(batch.counted, nats, jnp.zeros_like(nats)), right


def mlm_loss(model: Bert, batch: Batch, key: PRNGKeyArray | None = None) -> tuple[Mean, dict[str, Mean]]:
    """Mean over the batch's predictions, as `fullstride.step.jax.TrainStep` takes a loss.

    It stays one over all predictions where the batch is divided, however many of them each part has.

    Args:
        model: the model.
        batch: rows with hidden tokens, and the original tokens.
        key: random key of dropout; None drops nothing.

    Returns:
        The loss, whose `value` is in nats, and `accuracy`, the share of predictions in which no token was held
        likelier; both are 0 where nothing is to be predicted.

    """
    nats, right = predicted(model, batch, key)
    count = batch.counted.sum(dtype=nats.dtype)
    return Mean(nats.sum(), count), {"accuracy": Mean(right.sum(dtype=nats.dtype), count)}

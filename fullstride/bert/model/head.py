"""The masked language model's head: a layer, and a decoder that is the token embedding."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.layers import Dense, LayerNorm, gelu
from fullstride.step.jax.precision import wide


class Head(eqx.Module):
    """Dense, GELU and LayerNorm, then a product with the token embedding, plus a bias."""

    dense: Dense
    norm: LayerNorm
    bias: Float[Array, " vocab"]

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Random weights, no bias."""
        size = config.hidden_size
        self.dense = Dense(size, size, std=config.initializer_std, key=key)
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.bias = jnp.zeros(config.vocab_size, jnp.float32)

    def __call__(
        self, hidden: Float[Array, "*batch hidden"], table: Float[Array, "vocab hidden"]
    ) -> Float[Array, "*batch vocab"]:
        """Scores in fp32 or better."""
        scores = decoded(self.norm(gelu(self.dense(hidden))), table)
        return scores + jnp.broadcast_to(self.bias.astype(scores.dtype), scores.shape)


@jax.custom_vjp
def decoded(x: Float[Array, "*batch hidden"], table: Float[Array, "vocab hidden"]) -> Float[Array, "*batch vocab"]:
    """x E^T, added up and returned in fp32 or better.

    The gradient is cast to the factors' dtype before its own products: left in fp32, it would draw those out of bf16.
    """
    return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=wide(x.dtype))


def _forward(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return decoded(x, table), (x, table)


def _backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, table = saved
    grad, sums = grad.astype(x.dtype), wide(x.dtype)
    dx = jnp.einsum("...v,vh->...h", grad, table, preferred_element_type=sums)
    dtable = jnp.einsum("...v,...h->vh", grad, x, preferred_element_type=sums)
    return dx.astype(x.dtype), dtable.astype(table.dtype)


decoded.defvjp(_forward, _backward)

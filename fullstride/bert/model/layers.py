"""The parts that BERT's layers are made of; weights lie as PyTorch and the published files have them, (out, in)."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fullstride.step.jax.precision import wide

Key = PRNGKeyArray | None
Hidden = Float[Array, "b t hidden"]

# Random bits a dropped element costs: half of a uniform fp32's, and fine enough for any rate.
DROP_BITS = 16
# Tables of at most so many rows are read by a product: their gradient is then one too, and no contended scatter.
SMALL_TABLE = 16


def keys_of(key: Key, count: int) -> list[Key]:
    """A number of keys, or as many times None."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def normal(key: PRNGKeyArray, std: float, *shape: int) -> Float[Array, "..."]:
    """BERT's initial weights: a normal distribution cut off at two standard deviations."""
    return jnp.asarray(std, jnp.float32) * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


class Dense(eqx.Module):
    """y = x W^T + b along the last axis."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __init__(self, inputs: int, outputs: int, *, std: float, key: PRNGKeyArray, bias: bool = True):
        """Random weights, and a bias of 0 or none."""
        self.weight = normal(key, std, outputs, inputs)
        self.bias = jnp.zeros(outputs, jnp.float32) if bias else None

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """The product, in the inputs' dtype."""
        y = jnp.einsum("...i,oi->...o", x, self.weight)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)


class LayerNorm(eqx.Module):
    """LayerNorm over the last axis, in fp32 whatever goes in and out."""

    weight: Float[Array, " size"]
    bias: Float[Array, " size"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float, bias: bool = True):
        """The identity's weights."""
        self.weight, self.eps = jnp.ones(size, jnp.float32), eps
        self.bias = jnp.zeros(size, jnp.float32) if bias else None

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """(x - mean) / sqrt(var + eps) * weight + bias."""
        x32 = x.astype(wide(x.dtype))
        centred = x32 - x32.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        y = centred * scale * jnp.broadcast_to(self.weight.astype(x32.dtype), x32.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias.astype(x32.dtype), x32.shape)
        return y.astype(x.dtype)


class Dropout(eqx.Module):
    """Dropout: zeros for a share of the elements, the others scaled up; nothing without a key or in inference mode.

    The share is rounded to a multiple of 2^-16, and the scale is that of the rounded one.

    Attributes:
        inference: the flag that `equinox.nn.inference_mode` sets.

    """

    rate: float = eqx.field(static=True)
    inference: bool = False

    def __call__(self, x: Float[Array, "*shape"], key: PRNGKeyArray | None) -> Float[Array, "*shape"]:
        """The input with some elements dropped."""
        dropped = min(round(self.rate * 2**DROP_BITS), 2**DROP_BITS - 1)
        if key is None or self.inference or dropped == 0:
            return x
        kept = jax.random.bits(key, x.shape, jnp.uint16) >= jnp.asarray(dropped, jnp.uint16)
        # In fp32: bf16 has no 1 / 0.9, and all that is kept would come out 0.2 % too small.
        scaled = x.astype(wide(x.dtype)) * jnp.asarray(2**DROP_BITS / (2**DROP_BITS - dropped), wide(x.dtype))
        return jnp.where(kept, scaled.astype(x.dtype), jnp.zeros_like(x))


@jax.custom_vjp
def _rows(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0, mode="clip")


def _rows_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table, ids), (table, ids)


def _rows_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    # A frequent token adds up thousands of gradients, which bf16 would lose.
    table, ids = saved
    ids = jnp.clip(ids, 0, len(table) - 1)  # as they were read
    total = jnp.zeros(table.shape, wide(grad.dtype)).at[ids].add(grad.astype(wide(grad.dtype)))
    return total.astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


class Embedding(eqx.Module):
    """A table of vectors; gradients of its rows are accumulated in fp32."""

    weight: Float[Array, "rows size"]

    def __init__(self, rows: int, size: int, *, std: float, key: PRNGKeyArray):
        """Random vectors."""
        self.weight = normal(key, std, rows, size)

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch size"]:
        """The rows of these numbers; one that is too large takes the last row."""
        rows = self.weight.shape[0]
        if rows > SMALL_TABLE:
            return _rows(self.weight, ids)
        return jax.nn.one_hot(jnp.clip(ids, 0, rows - 1), rows, dtype=self.weight.dtype) @ self.weight


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the normal distribution's cumulative function at x, with erf itself and in fp32 (arXiv:1606.08415)."""
    x32 = x.astype(wide(x.dtype))
    return (x32 * (1 + jax.lax.erf(x32 * math.sqrt(0.5))) / 2).astype(x.dtype)

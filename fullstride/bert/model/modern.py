"""Layers of ModernBERT (arXiv:2412.13663): normed first, rotary positions, gated, global or local attention."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fullstride.bert.model.attention import Heads, Lengths, Segments, mixed
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.layers import Dense, Dropout, Hidden, Key, LayerNorm, gelu, keys_of
from fullstride.step.jax.precision import wide


def rotated(x: Heads, theta: float) -> Heads:
    """Rotate pairs (i, i + size / 2) of a head by place * theta^(-2 i / size), in fp32 (arXiv:2104.09864).

    Places count from the row's start: attention knows their differences alone, which are those in a text of its own.
    """
    half, dtype = x.shape[-1] // 2, wide(x.dtype)
    turns = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angles = (jnp.arange(x.shape[1], dtype=dtype)[:, None] * turns[None])[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def gated(x: Float[Array, "*batch twice"]) -> Float[Array, "*batch size"]:
    """GELU of the first half times the second half: GeGLU (arXiv:2002.05202)."""
    first, second = jnp.split(x, 2, axis=-1)
    return gelu(first) * second


class RotaryAttention(eqx.Module):
    """Multi-head attention with rotary positions, among all tokens of a text or those within a window.

    Attributes:
        window: tokens on each side that a token attends to; None for all.

    """

    projections: Dense
    output: Dense
    dropout: Dropout
    heads: int = eqx.field(static=True)
    implementation: str = eqx.field(static=True)
    theta: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: BertConfig, number: int, *, key: PRNGKeyArray):
        """Random projections of the layer of this number."""
        size, (into, out) = config.hidden_size, jax.random.split(key)
        self.projections = Dense(size, 3 * size, std=config.initializer_std, key=into, bias=False)
        self.output = Dense(size, size, std=_out_std(config), key=out, bias=False)
        self.dropout = Dropout(config.attention_dropout)
        self.heads, self.implementation = config.heads, config.attention
        local = number % config.global_every > 0
        self.theta = float(config.local_theta if local else config.global_theta)
        self.window = config.local_attention // 2 if local else None

    def __call__(self, x: Hidden, lengths: Lengths, segments: Segments, key: Key) -> Hidden:
        """Attend from each token to the tokens of its own text."""
        split = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        q, k, v = (part.squeeze(2) for part in jnp.split(self.projections(x).reshape(split), 3, axis=2))
        given = {"dropout": self.dropout, "dropout_key": key, "lengths": lengths, "segments": segments}
        q, k = rotated(q, self.theta), rotated(k, self.theta)
        found = mixed(q, k, v, attention=self.implementation, window=self.window, **given)
        return self.output(found.reshape(x.shape))


class ModernLayer(eqx.Module):
    """Attention and a gated feed-forward network, each normed first and added to its input."""

    attention_norm: LayerNorm | None
    attention: RotaryAttention
    mlp_norm: LayerNorm
    intermediate: Dense
    output: Dense
    dropout: Dropout

    def __init__(self, config: BertConfig, number: int, *, key: PRNGKeyArray):
        """Random weights; the first layer's input is normed already."""
        attention, inner, outer = jax.random.split(key, 3)
        size, std, eps = config.hidden_size, config.initializer_std, config.norm_eps
        self.attention_norm = LayerNorm(size, eps=eps, bias=False) if number else None
        self.attention = RotaryAttention(config, number, key=attention)
        self.mlp_norm = LayerNorm(size, eps=eps, bias=False)
        self.intermediate = Dense(size, 2 * config.intermediate_size, std=std, key=inner, bias=False)
        self.output = Dense(config.intermediate_size, size, std=_out_std(config), key=outer, bias=False)
        self.dropout = Dropout(config.hidden_dropout)

    def __call__(self, x: Hidden, lengths: Lengths, segments: Segments, key: Key) -> Hidden:
        """The next layer's input."""
        weights, first, second = keys_of(key, 3)
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, lengths, segments, weights), first)
        return x + self.dropout(self.output(gated(self.intermediate(self.mlp_norm(x)))), second)


def _out_std(config: BertConfig) -> float:
    """Deviation of the weights that write into the residual stream."""
    return config.initializer_std / math.sqrt(2 * config.layers)

"""Attention among the tokens of one text: fused by cuDNN, by XLA, or eager with dropout."""

import functools
import math
import operator
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fullstride.bert.model.layers import Dropout
from fullstride.errors import ConfigError
from fullstride.step.jax.precision import wide

Heads = Float[Array, "b t heads size"]
Lengths = Int[Array, " b"] | None
Segments = Int[Array, "b t"] | None

HALVES = ("bfloat16", "float16")
# Of cuDNN's fused attention on any GPU that has it.
LARGEST_HEAD, HEAD_STEP = 128, 8
# Of keys that its backward pass reads. It hides the rest of a tile that is not full surely only if it is told of
# padding: else the gradient of Q can be NaN (github.com/NVIDIA/cudnn-frontend/pull/628 and issues/160).
TILE = 128


def _why_not_cudnn(dtype: str, head_size: int, packed: int, backend: str) -> str | None:
    """Why cuDNN's fused attention cannot run here, with the remedy; None if it can."""
    if backend != "gpu":
        return f"it needs an NVIDIA GPU, but JAX runs on {backend}; use attention=xla"
    if dtype not in HALVES:
        return f"it computes in bf16 and fp16, but the queries are {dtype}; use precision=bf16, or attention=xla"
    if head_size > LARGEST_HEAD or head_size % HEAD_STEP:
        return f"head_size is {head_size}, expected a multiple of {HEAD_STEP} up to {LARGEST_HEAD}; use attention=xla"
    if packed % 2:
        return f"packed rows have {packed} tokens, expected an even number; use attention=xla"
    return None


def _why_not_xla(dtype: str, backend: str) -> str | None:
    """Why JAX's own attention cannot run, or not in this dtype, with the remedy; None if it can."""
    if dtype == "float64":
        return "its softmax is fp32, but the queries are float64; use attention=eager"
    if dtype == "float16" and backend == "cpu":
        return "XLA has no fp16 matrix product for attention on a CPU; use attention=eager, or precision=bf16"
    return None


def chosen(attention: str, drops: bool, dtype: str, head_size: int, packed: int = 0, backend: str | None = None) -> str:
    """Name of the implementation that a named or automatic choice selects.

    Args:
        attention: `auto` or the name of an implementation.
        drops: whether the model's training drops attention weights.
        dtype: dtype of queries, keys and values.
        head_size: length of their last axis.
        packed: number of tokens of a row that holds several texts; 0 for one text a row.
        backend: JAX's backend; `jax.default_backend()` by default.

    Raises:
        ConfigError: if a named implementation cannot run, with the reason.

    """
    backend = backend or jax.default_backend()
    reasons = {"cudnn": _why_not_cudnn(dtype, head_size, packed, backend), "xla": _why_not_xla(dtype, backend)}
    if attention != "auto":
        if reason := reasons.get(attention):
            raise ConfigError(f"attention={attention}: {reason}")
        return attention
    return "eager" if drops else next((name for name, reason in reasons.items() if not reason), "eager")


def mixed(
    query: Heads,
    key: Heads,
    value: Heads,
    *,
    attention: str,
    dropout: Dropout,
    dropout_key: PRNGKeyArray | None,
    lengths: Lengths = None,
    segments: Segments = None,
    window: int | None = None,
) -> Heads:
    """Attention by the implementation that `attention` selects, see `chosen`.

    Args:
        query: Q.
        key: K.
        value: V.
        attention: `auto` or the name of an implementation.
        dropout: dropout of the attention weights.
        dropout_key: its random key; None drops nothing.
        lengths: number of tokens of each row before its padding.
        segments: a number for each token; tokens of the same number belong together.
        window: tokens on each side that a token attends to, besides itself; None for all.

    Raises:
        ConfigError: if a named implementation cannot run here.

    """
    length = query.shape[1]
    if window is not None and lengths is not None:
        # Padding is a text of its own: far from every token, it would have nothing to attend to.
        real = (jnp.arange(length)[None] < lengths[:, None]).astype(jnp.int32)
        segments, lengths = real if segments is None else segments * real, None
    masks: dict[str, Any] = {"lengths": lengths, "segments": segments, "window": window}
    packed = 0 if segments is None and window is None else length
    name = chosen(attention, dropout.rate > 0, query.dtype.name, query.shape[-1], packed)
    if name == "eager":
        return attend_eagerly(query, key, value, dropout=dropout, dropout_key=dropout_key, **masks)
    return attend(query, key, value, implementation=name, **masks)


def attend(
    query: Heads,
    key: Heads,
    value: Heads,
    *,
    implementation: str,
    lengths: Lengths = None,
    segments: Segments = None,
    window: int | None = None,
) -> Heads:
    """softmax(Q K^T / sqrt(size)) V over the tokens that belong together, by `jax.nn.dot_product_attention`.

    Args:
        query: Q.
        key: K.
        value: V.
        implementation: `cudnn` or `xla`.
        lengths: number of tokens of each row, followed by padding, whose own results are arbitrary.
        segments: a number for each token; tokens of the same number belong together.
        window: tokens on each side that a token attends to; None for all.

    """
    if implementation == "cudnn" and lengths is None and query.shape[1] % TILE:
        lengths = jnp.full(query.shape[0], query.shape[1])
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=allowed(query.shape[1], None, segments, window),
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation=cast(Literal["cudnn", "xla"], implementation),
    )


def attend_eagerly(
    query: Heads,
    key: Heads,
    value: Heads,
    *,
    dropout: Dropout,
    dropout_key: PRNGKeyArray | None,
    lengths: Lengths = None,
    segments: Segments = None,
    window: int | None = None,
) -> Heads:
    """Compute attention in separate operations, softmax in fp32, with dropout on its weights in training."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.asarray(math.sqrt(query.shape[-1]), query.dtype)
    scores = scores.astype(wide(scores.dtype))
    mask = allowed(query.shape[1], lengths, segments, window)
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, lowest)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(value.dtype), dropout_key)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def together(segments: Int[Array, "b t"]) -> Bool[Array, "b 1 t t"]:
    """Mask of the pairs of tokens that belong to one text."""
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def allowed(
    length: int, lengths: Lengths, segments: Segments, window: int | None = None
) -> Bool[Array, "#b 1 #t t"] | None:
    """Mask of the keys that each query attends to; None for all."""
    place, masks = jnp.arange(length), []
    if segments is not None:
        masks.append(together(segments))
    if lengths is not None:
        masks.append((place[None] < lengths[:, None])[:, None, None])
    if window is not None:
        masks.append((jnp.abs(place[:, None] - place[None]) <= window)[None, None])
    return functools.reduce(operator.and_, masks) if masks else None

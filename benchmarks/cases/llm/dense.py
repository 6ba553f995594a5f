"""A decoder in plain fp32: whole sequences, no pool, no kernels, layer by layer; what the engine is compared with."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from benchmarks.cases.llm.devices import MadeParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.models.rope import angles, frequencies, magnitude

Layer = dict[str, Array]


class Dense:
    """A model whose weights are rounded as an engine's are; one layer of them is on the device at a time."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Any], dtype: str, device: Any):
        self._config, self._parameters, self._dtype, self._device = config, parameters, dtype, device
        self._parts: dict[str, list[str]] = {}
        for name in parameters:
            prefix, _, part = name.rpartition(".")
            self._parts.setdefault(prefix, []).append(part)

    def logprobs(self, sequences: Sequence[Sequence[int]], count: int) -> list[Float32[np.ndarray, "count vocab"]]:
        """Of the last `count` tokens of each sequence, given all before them."""
        config, embed = self._config, self._get("embed")
        states = [embed[jnp.asarray(sequence[:-1])] for sequence in sequences]
        with jax.default_matmul_precision("highest"):
            for number in range(config.layers):
                layer = {part: self._get(f"layers.{number}.{part}") for part in self._parts[f"layers.{number}"]}
                states = [_layer(config)(layer, x) for x in states]
            head, norm = embed if config.tied else self._get("head"), self._get("norm")
            last = [_norm(x[-count:], norm, config.rms_eps) @ head.T for x in states]
        return [np.asarray(jax.nn.log_softmax(x)) for x in last]

    def _get(self, name: str) -> Float[Array, "..."]:
        if isinstance(self._parameters, MadeParameters):  # which are slow to bring to the host
            value = self._parameters.make(name, self._device)
        else:
            value = jax.device_put(self._parameters[name], self._device)
        return value.astype(self._dtype).astype(jnp.float32)


@functools.cache
def _layer(config: ModelConfig) -> Any:
    """One of a model's layers, compiled once for sequences of a length."""

    def apply(layer: Layer, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        x = x + _attention(config, layer, _norm(x, layer["attn_norm"], config.rms_eps))
        h = _norm(x, layer["mlp_norm"], config.rms_eps)
        return x + (jax.nn.silu(h @ layer["gate"].T) * (h @ layer["up"].T)) @ layer["down"].T

    return jax.jit(apply)


def _norm(x: Float[Array, "*T width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*T width"]:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(config: ModelConfig, layer: Layer, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
    q, k, v = (_heads(config, layer, name, x) for name in "qkv")
    q, k = (_rotated(config, layer, name, each) for name, each in (("q", q), ("k", k)))
    shared, seen = config.heads // config.kv_heads, jnp.tril(jnp.ones((len(x), len(x)), bool))

    def head(number):  # one at a time: the scores of a long sequence fill a device
        own = number // shared
        scores = jnp.where(seen, q[:, number] @ k[:, own].T / math.sqrt(config.head_dim), -jnp.inf)
        return jax.nn.softmax(scores) @ v[:, own]

    mixed = lax.map(head, jnp.arange(config.heads))
    return mixed.swapaxes(0, 1).reshape(len(x), -1) @ layer["o"].T


def _heads(config: ModelConfig, layer: Layer, name: str, x: Float[Array, "T hidden"]) -> Float[Array, "T heads wide"]:
    y = x @ layer[name].T
    y = y + layer[f"{name}_bias"] if config.qkv_bias else y
    return y.reshape(len(x), -1, config.head_dim)


def _rotated(config: ModelConfig, layer: Layer, name: str, x: Float[Array, "T heads wide"]) -> Array:
    x = _norm(x, layer[f"{name}_norm"], config.rms_eps) if config.qk_norm else x
    cos, sin = angles(jnp.arange(len(x)), frequencies(config), magnitude(config))
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

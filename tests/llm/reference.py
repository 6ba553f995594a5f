"""A decoder-only transformer in plain numpy, from a configuration and parameters alone: no cache, no batch."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fullstride.llm.config import Llama3Rope, ModelConfig


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position of each pair; Llama 3's ramp by how often a pair turns within the original length."""
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    rope = config.rope_scaling
    if rope is None:
        return plain
    assert isinstance(rope, Llama3Rope)
    turns = rope.original_max_position * plain / (2 * math.pi)
    ramp = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return plain * (ramp + (1 - ramp) / rope.factor)


def rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """RoPE over (positions, heads, head_dim), a head's first half with its second."""
    angles = np.arange(len(x))[:, None, None] * frequencies(config)
    a, b = np.split(x, 2, axis=-1)
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate(turned, -1).astype(x.dtype)


def attention(x: np.ndarray, get, config: ModelConfig) -> np.ndarray:
    def project(name: str, heads: int) -> np.ndarray:
        y = x @ get(name).T
        y = y + get(f"{name}_bias") if config.qkv_bias else y
        return y.reshape(len(x), heads, config.head_dim)

    q, k, v = project("q", config.heads), project("k", config.kv_heads), project("v", config.kv_heads)
    if config.qk_norm:
        q, k = rms_norm(q, get("q_norm"), config.rms_eps), rms_norm(k, get("k_norm"), config.rms_eps)
    shared = config.heads // config.kv_heads
    q, k, v = rotate(q, config), np.repeat(rotate(k, config), shared, 1), np.repeat(v, shared, 1)
    scores = np.einsum("ihd,jhd->hij", q, k, optimize=True) / math.sqrt(config.head_dim)
    scores = scores + np.triu(np.full((len(x), len(x)), -np.inf, x.dtype), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v, optimize=True)
    return mixed.reshape(len(x), -1) @ get("o").T


def mlp(x: np.ndarray, get) -> np.ndarray:
    gate = x @ get("gate").T
    return (gate / (1 + np.exp(-gate)) * (x @ get("up").T)) @ get("down").T


def logits(
    config: ModelConfig, parameters: Mapping[str, np.ndarray], ids: Sequence[int], dtype: type = np.float64
) -> np.ndarray:
    """Return the logits of each position, (positions, vocabulary), with matrices and activations of `dtype`."""
    embed = np.asarray(parameters["embed"], dtype)
    x = embed[list(ids)]
    for layer in range(config.layers):

        def get(name: str, layer=layer) -> np.ndarray:
            return np.asarray(parameters[f"layers.{layer}.{name}"], dtype)

        x = x + attention(rms_norm(x, get("attn_norm"), config.rms_eps), get, config)
        x = x + mlp(rms_norm(x, get("mlp_norm"), config.rms_eps), get)
    head = embed if config.tied else np.asarray(parameters["head"], dtype)
    return rms_norm(x, np.asarray(parameters["norm"], dtype), config.rms_eps) @ head.T

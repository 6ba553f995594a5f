"""Angles of the rotary embedding (arXiv:2104.09864), with Llama 3's scaling."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fullstride.llm.config import Llama3Rope, ModelConfig


def frequencies(config: ModelConfig) -> Float[np.ndarray, " half"]:
    """Radians a position, of each pair of a head's elements: theta^(-2i / head_dim)."""
    base = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return (_scaled(base, config.rope_scaling) if config.rope_scaling else base).astype(np.float32)


def _scaled(base: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    """Slower by `factor` what turns less than low_freq_factor times in the original length, with a ramp above it."""
    turns = scaling.original_max_position * base / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    return base * (kept + (1 - kept) / scaling.factor)


def angles(
    positions: Int[Array, " T"], frequencies: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines, fp32."""
    turned = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(turned), jnp.sin(turned)

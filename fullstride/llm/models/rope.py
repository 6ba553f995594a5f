"""Angles of the rotary embedding (arXiv:2104.09864), and their scaling for longer sequences."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fullstride.llm.config import LinearRope, Llama3Rope, ModelConfig, YarnRope


def frequencies(config: ModelConfig) -> Float[np.ndarray, " half"]:
    """Return the radians per position of each pair of a head's elements: theta^(-2i / head_dim), scaled."""
    base = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    match config.rope_scaling:
        case Llama3Rope() as scaling:
            base = _llama3(base, scaling)
        case YarnRope() as scaling:
            base = _yarn(base, scaling, config.rope_theta)
        case LinearRope(factor):
            base = base / factor
    return base.astype(np.float32)


def magnitude(config: ModelConfig) -> float:
    """Return the factor of cosines and sines."""
    scaling = config.rope_scaling
    return scaling.magnitude if isinstance(scaling, YarnRope) else 1.0


def _llama3(base: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    """Divide by `factor` the frequencies below low_freq_factor turns per original length, with a ramp above."""
    turns = scaling.original_max_position * base / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    return base * (kept + (1 - kept) / scaling.factor)


def _yarn(base: np.ndarray, scaling: YarnRope, theta: float) -> np.ndarray:
    """Apply the ramp of arXiv:2309.00071 as its authors' code does: linear in the index of the pair."""
    width = 2 * len(base)

    def pair(turns: float) -> float:
        """Return the pair with `turns` turns in the original length: theta^(-2i / width) original / 2 pi = turns."""
        return width * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    divided = np.clip((np.arange(len(base)) - low) / ((high - low) or 1e-3), 0, 1)
    return base * (divided / scaling.factor + 1 - divided)


def angles(
    positions: Int[Array, " T"], frequencies: Float[np.ndarray, " half"], magnitude: float = 1.0
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines, fp32, times `magnitude`."""
    turned = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)

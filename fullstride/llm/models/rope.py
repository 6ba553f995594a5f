"""Angles of the rotary embedding (arXiv:2104.09864), and their scaling for longer sequences."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fullstride.llm.config import LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope


def frequencies(config: ModelConfig) -> Float[np.ndarray, " half"]:
    """Return the radians per position of each pair of a head's elements: theta^(-2i / width), scaled.

    The width is that of what RoPE rotates; pairs after it turn by nothing.
    """
    width = config.rotary_dim or config.head_dim
    base = _plain(config.rope_theta, width)
    match config.rope_scaling:
        case Llama3Rope() as scaling:
            base = _llama3(base, scaling)
        case YarnRope() as scaling:
            base = _yarn(base, scaling, config.rope_theta)
        case LinearRope(factor):
            base = base / factor
        case LongRope(factors):
            base = base / np.asarray(factors)
    return _padded(base, config.head_dim // 2, 0.0)


def window_frequencies(config: ModelConfig) -> Float[np.ndarray, " half"] | None:
    """Return those of layers with a window if they have a base of their own."""
    if config.window_theta is None:
        return None
    return _padded(_plain(config.window_theta, config.rotary_dim or config.head_dim), config.head_dim // 2, 0.0)


def magnitude(config: ModelConfig) -> float | Float[np.ndarray, " half"]:
    """Return the factor of cosines and sines: one for all pairs, or one each if RoPE leaves some as they are."""
    scaling = config.rope_scaling
    found = scaling.magnitude if isinstance(scaling, YarnRope | LongRope) else 1.0
    if found == 1 or config.rotary_dim in (None, config.head_dim):
        return found
    return _padded(np.full(config.rotary_dim // 2, found), config.head_dim // 2, 1.0)


def _plain(theta: float, width: int) -> np.ndarray:
    return theta ** -(np.arange(0, width, 2) / width)


def _padded(values: np.ndarray, pairs: int, rest: float) -> np.ndarray:
    return np.pad(values, (0, pairs - len(values)), constant_values=rest).astype(np.float32)


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
    positions: Int[Array, " T"],
    frequencies: Float[np.ndarray, " half"],
    magnitude: float | Float[np.ndarray, " half"] = 1.0,
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines, fp32, times `magnitude`."""
    turned = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    return (cos, sin) if np.all(magnitude == 1) else (cos * magnitude, sin * magnitude)


def step_angles(config: ModelConfig, positions: Int[Array, " T"]) -> tuple[Float[Array, "T half"], ...]:
    """Cosines and sines of a step, as the last fields of a `StepBatch`."""
    found = angles(positions, frequencies(config), magnitude(config))
    windowed = window_frequencies(config)
    return found if windowed is None else (*found, *angles(positions, windowed))

"""`fullstride.meanflow.models.dit` in Equinox, images in NHWC."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.cases.meanflow.in_jax.layers import (
    FULL,
    Implementation,
    Linear,
    Weights,
    ada_layer_norm,
    attention,
    in_order,
)
from fullstride.meanflow.config.networks import DiTConfig

TIME_FEATURES, LONGEST_PERIOD = 256, 10_000.0
Tokens = Float[Array, "b n d"]


def frequencies(count: int) -> np.ndarray:
    """Return `count` frequencies falling geometrically from 1 towards 1 / 10,000 radians; fp64."""
    return np.exp(-math.log(LONGEST_PERIOD) * np.arange(count) / count)


def position_embedding(side: int, width: int) -> np.ndarray:
    """Return the embedding of a side x side grid, sines and cosines of columns, then of rows; fp32."""
    row, column = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = [place.reshape(-1, 1) * frequencies(width // 4) for place in (column, row)]
    return np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], 1).astype(FULL)


class TimeMlp(eqx.Module):
    """Cosines and sines of a time through two linear layers, in fp32."""

    hidden: Linear
    out: Linear
    scale: float = eqx.field(static=True)

    def __init__(self, weights: Weights, scale: float):
        self.hidden, self.out = Linear(weights["hidden"], FULL), Linear(weights["out"], FULL)
        self.scale = scale

    def __call__(self, time: Float[Array, " b"]) -> Float[Array, "b d"]:
        """Embed each time."""
        angle = (time * self.scale)[:, None] * jnp.asarray(frequencies(TIME_FEATURES // 2), FULL)
        return self.out(jax.nn.silu(self.hidden(jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], 1))))


class Modulation(eqx.Module):
    """Shifts, scales and gates out of the conditioning."""

    linear: Linear
    count: int = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str, count: int):
        self.linear, self.count = Linear(weights["linear"], dtype), count

    def __call__(self, conditioning: Float[Array, "b d"]) -> list[Float[Array, "b 1 d"]]:
        """Return `count` vectors for all tokens of a sample."""
        return jnp.split(self.linear(jax.nn.silu(conditioning))[:, None], self.count, -1)


class Block(eqx.Module):
    """Attention, then a perceptron, each behind a modulated norm and with a gate."""

    modulation: Modulation
    qkv: Linear
    out: Linear
    qk_weight: Float[Array, "2 d"] | None
    first: Linear
    last: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str, heads: int):
        attention, mlp = weights["attention"], weights["mlp"]
        self.modulation, self.heads = Modulation(weights["modulation"], dtype, 6), heads
        self.qkv, self.out = (Linear(attention[name], dtype) for name in ("qkv", "out"))
        self.qk_weight = jnp.asarray(attention["qk_weight"]) if "qk_weight" in attention else None
        self.first, self.last = (Linear(mlp[name], dtype) for name in ("0", "2"))

    def __call__(self, x: Tokens, conditioning: Float[Array, "b d"], implementation: Implementation) -> Tokens:
        """Make two residual steps."""
        dtype = self.qkv.dtype
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(conditioning)
        qkv = self.qkv(ada_layer_norm(x, scale1, shift1, dtype))
        x = x + (gate1 * self.out(attention(qkv, self.heads, implementation, self.qk_weight))).astype(FULL)
        hidden = self.first(ada_layer_norm(x, scale2, shift2, dtype)).astype(FULL)
        return x + (gate2 * self.last(jax.nn.gelu(hidden, approximate=True))).astype(FULL)


class DiT(eqx.Module):
    """Average velocity u(z, r, t); the residual stream is fp32, as the position embedding makes PyTorch's."""

    patch_in: Linear
    time: TimeMlp
    gap: TimeMlp
    blocks: list[Block]
    modulation_out: Modulation
    patch_out: Linear
    patch_size: int = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str, config: DiTConfig):
        times = weights["conditioning"]
        self.time, self.gap = (TimeMlp(times[name], config.time_scale) for name in ("time", "gap"))
        self.patch_in, self.patch_out = (Linear(weights[name], dtype) for name in ("patch_in", "patch_out"))
        self.blocks = [Block(block, dtype, config.heads) for block in in_order(weights["blocks"])]
        self.modulation_out, self.patch_size = Modulation(weights["modulation_out"], dtype, 2), config.patch_size

    def __call__(
        self,
        z: Float[Array, "b h w c"],
        r: Float[Array, " b"],
        t: Float[Array, " b"],
        implementation: Implementation = "xla",
    ) -> Float[Array, "b h w c"]:
        """Return u for square images z (b, h, w, c), by `implementation` of attention."""
        p, side = self.patch_size, z.shape[1] // self.patch_size
        patches = z.reshape(len(z), side, p, side, p, -1).swapaxes(2, 3).reshape(len(z), side**2, -1)
        conditioning = self.time(t) + self.gap(t - r)
        x = self.patch_in(patches)
        x = x.astype(FULL) + position_embedding(side, x.shape[2])
        for block in self.blocks:
            x = block(x, conditioning, implementation)
        shift, scale = self.modulation_out(conditioning)
        out = self.patch_out(ada_layer_norm(x, scale, shift, self.patch_out.dtype))
        return out.reshape(len(z), side, side, p, p, -1).swapaxes(2, 3).reshape(z.shape)

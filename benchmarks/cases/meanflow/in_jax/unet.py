"""`fullstride.meanflow.models.unet` in Equinox, images in NHWC."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.cases.meanflow.in_jax.layers import (
    FULL,
    Conv,
    GroupNorm,
    Implementation,
    Linear,
    Weights,
    attention,
    in_order,
)

Images = Float[Array, "b h w c"]
HEAD_CHANNELS, GROUPS, MIN_CHANNELS_A_GROUP = 64, 32, 4


def group_norm(weights: Weights, dtype: str, *, silu: bool) -> GroupNorm:
    """Return the norm with the largest number of equal groups up to 32 of at least 4 channels each."""
    channels = len(weights["weight"])
    most = max(1, min(GROUPS, channels // MIN_CHANNELS_A_GROUP))
    groups = next(g for g in range(most, 0, -1) if channels % g == 0)
    return GroupNorm(weights, dtype, groups, silu=silu)


class Conditioning(eqx.Module):
    """Vector of both time channels, t and t - r, in fp32."""

    hidden: Linear
    out: Linear
    frequencies: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, weights: Weights):
        self.hidden, self.out = Linear(weights["hidden"], FULL), Linear(weights["out"], FULL)
        self.frequencies = tuple(weights["time"]["frequencies"].tolist())

    def __call__(self, r: Float[Array, " b"], t: Float[Array, " b"]) -> Float[Array, "b e"]:
        """Embed (t, t - r)."""
        waves = []
        for time in (t, t - r):
            angle = time[:, None] * jnp.asarray(self.frequencies, FULL)
            waves += [jnp.sin(angle), jnp.cos(angle)]
        return jax.nn.silu(self.out(jax.nn.silu(self.hidden(jnp.concatenate(waves, 1)))))


class ResidualBlock(eqx.Module):
    """norm, SiLU, convolution, shift by the conditioning; norm, SiLU, convolution; plus the input."""

    norm1: GroupNorm
    conv1: Conv
    shift: Linear
    norm2: GroupNorm
    conv2: Conv
    skip: Conv | None

    def __init__(self, weights: Weights, dtype: str):
        self.norm1, self.norm2 = (group_norm(weights[name], dtype, silu=True) for name in ("norm1", "norm2"))
        self.conv1, self.conv2 = (Conv(weights[name], dtype) for name in ("conv1", "conv2"))
        self.shift = Linear(weights["shift"], dtype)
        self.skip = Conv(weights["skip"], dtype) if "skip" in weights else None

    def __call__(self, x: Images, conditioning: Float[Array, "b e"]) -> Float[Array, "b h w d"]:
        """Make one residual step."""
        h = self.conv1(self.norm1(x)) + self.shift(conditioning)[:, None, None]
        return (x if self.skip is None else self.skip(x)) + self.conv2(self.norm2(h))


class SelfAttention(eqx.Module):
    """Multi-head self-attention over pixels, with its norm and residual."""

    norm: GroupNorm
    qkv: Conv
    out: Conv

    def __init__(self, weights: Weights, dtype: str):
        self.norm = group_norm(weights["norm"], dtype, silu=False)
        self.qkv, self.out = (Conv(weights[name], dtype) for name in ("qkv", "out"))

    def __call__(self, x: Images, implementation: Implementation) -> Images:
        """x + attention over the h * w pixels."""
        qkv = self.qkv(self.norm(x)).reshape(len(x), -1, 3 * x.shape[3])
        heads = max(1, x.shape[3] // HEAD_CHANNELS)
        return x + self.out(attention(qkv, heads, implementation).reshape(x.shape))


class Stage(eqx.Module):
    """Residual block, then attention if PyTorch's has it."""

    block: ResidualBlock
    attention: SelfAttention | None

    def __init__(self, weights: Weights, dtype: str):
        self.block = ResidualBlock(weights["block"], dtype)
        self.attention = SelfAttention(weights["attention"], dtype) if "attention" in weights else None

    def __call__(
        self, x: Images, conditioning: Float[Array, "b e"], implementation: Implementation
    ) -> Float[Array, "b h w d"]:
        """Apply the block, then attention."""
        h = self.block(x, conditioning)
        return h if self.attention is None else self.attention(h, implementation)


class UNet(eqx.Module):
    """Average velocity u(z, r, t)."""

    conditioning: Conditioning
    conv_in: Conv
    down: list[Stage | Conv]
    middle: list[Stage]
    up: list[Stage | Conv]
    norm_out: GroupNorm
    conv_out: Conv

    def __init__(self, weights: Weights, dtype: str):
        """Take over the weights; their names tell all but the strides, which convolutions between levels have."""
        self.conditioning = Conditioning(weights["conditioning"])
        self.conv_in, self.conv_out = (Conv(weights[name], dtype) for name in ("conv_in", "conv_out"))
        self.down = [
            Stage(layer, dtype) if "block" in layer else Conv(layer, dtype, stride=2)
            for layer in in_order(weights["down"])
        ]
        self.middle = [Stage(layer, dtype) for layer in in_order(weights["middle"])]
        self.up = [
            Stage(layer, dtype) if "block" in layer else Conv(layer["1"], dtype) for layer in in_order(weights["up"])
        ]
        self.norm_out = group_norm(weights["norm_out"], dtype, silu=True)

    def __call__(
        self, z: Images, r: Float[Array, " b"], t: Float[Array, " b"], implementation: Implementation = "xla"
    ) -> Images:
        """Return u for images z (b, h, w, c), by `implementation` of attention."""
        conditioning = self.conditioning(r, t)
        h = self.conv_in(z)
        skips = [h]
        for layer in self.down:
            h = layer(h, conditioning, implementation) if isinstance(layer, Stage) else layer(h)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, conditioning, implementation)
        for layer in self.up:
            if isinstance(layer, Stage):
                h = layer(jnp.concatenate([h, skips.pop()], -1), conditioning, implementation)
            else:
                h = layer(h.repeat(2, 1).repeat(2, 2))
        return self.conv_out(self.norm_out(h))

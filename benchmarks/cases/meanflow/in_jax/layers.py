"""Layers in Equinox that take over the weights of `fullstride.meanflow.models`, with images in NHWC.

As under PyTorch's autocast, products are in the layer's dtype, and norms and softmax compute in fp32.
"""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Weights = Mapping[str, Any]  # arrays in a tree of dicts, as the names of PyTorch's parameters have it
FULL = "float32"
Implementation = Literal["xla", "cudnn"]  # of attention


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the tree of arrays that are named by their paths, such as `down.0.block.conv1.weight`."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = array
    return tree


def in_order(layers: Weights) -> list[Weights]:
    """Return the entries of a `ModuleList`, whose keys are numbers."""
    return [layers[key] for key in sorted(layers, key=int)]


class Linear(eqx.Module):
    """x W^T + b."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]
    dtype: str = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str):
        self.weight, self.bias = map(jnp.asarray, (weights["weight"], weights["bias"]))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*s in"]) -> Float[Array, "*s out"]:
        """Apply it to the last axis."""
        return x.astype(self.dtype) @ self.weight.astype(self.dtype).T + self.bias.astype(self.dtype)


class Conv(eqx.Module):
    """Convolution with a square kernel of odd size, padded so that a stride of 1 keeps the image's size."""

    weight: Float[Array, "size size in out"]
    bias: Float[Array, " out"]
    stride: int = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str, stride: int = 1):
        self.weight, self.bias = jnp.asarray(weights["weight"].transpose(2, 3, 1, 0)), jnp.asarray(weights["bias"])
        self.stride, self.dtype = stride, dtype

    def __call__(self, x: Float[Array, "b h w in"]) -> Float[Array, "b h2 w2 out"]:
        """Convolve; a kernel of one pixel is a matrix product."""
        x, weight, bias = (a.astype(self.dtype) for a in (x, self.weight, self.bias))
        if len(weight) == 1:
            return x @ weight[0, 0] + bias
        edge, forms = len(weight) // 2, ("NHWC", "HWIO", "NHWC")
        padding, strides = [(edge, edge)] * 2, (self.stride,) * 2
        return jax.lax.conv_general_dilated(x, weight, strides, padding, dimension_numbers=forms) + bias


def normalized(x: Float[Array, "..."], axes: tuple[int, ...], eps: float) -> Float[Array, "..."]:
    """Return x in fp32, with mean 0 and variance 1 over some axes; both moments come from one pass over x."""
    x = x.astype(FULL)
    mean = x.mean(axes, keepdims=True)
    variance = jnp.maximum(jnp.square(x).mean(axes, keepdims=True) - jnp.square(mean), 0)
    return (x - mean) * jax.lax.rsqrt(variance + eps)


class GroupNorm(eqx.Module):
    """Group normalisation (arXiv:1803.08494), with SiLU behind it on demand."""

    weight: Float[Array, " c"]
    bias: Float[Array, " c"]
    groups: int = eqx.field(static=True)
    silu: bool = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __init__(self, weights: Weights, dtype: str, groups: int, *, silu: bool):
        self.weight, self.bias = map(jnp.asarray, (weights["weight"], weights["bias"]))
        self.groups = groups
        self.silu = silu
        self.dtype = dtype

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Normalise over each group's channels and pixels."""
        grouped = x.reshape(*x.shape[:3], self.groups, -1)
        y = normalized(grouped, (1, 2, 4), 1e-5).reshape(x.shape) * self.weight + self.bias
        return (jax.nn.silu(y) if self.silu else y).astype(self.dtype)


def ada_layer_norm(
    x: Float[Array, "b n d"], scale: Float[Array, "b 1 d"], shift: Float[Array, "b 1 d"], dtype: str
) -> Float[Array, "b n d"]:
    """(1 + scale) layer_norm(x) + shift (arXiv:2212.09748)."""
    return ((1 + scale.astype(FULL)) * normalized(x, (-1,), 1e-6) + shift.astype(FULL)).astype(dtype)


def attention(
    qkv: Float[Array, "b n c"], heads: int, implementation: Implementation, weights: Float[Array, "2 d"] | None = None
) -> Float[Array, "b n hd"]:
    """Attention between tokens, of their queries, keys and values side by side.

    `xla` writes the logits out and has a derivative in both modes; cuDNN's fused kernels have none in forward mode.
    """
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
    if weights is not None:
        q, k = (rms_norm(x, weight) for x, weight in zip((q, k), weights, strict=True))
    out = jax.nn.dot_product_attention(q, k, v, implementation=implementation)
    return out.reshape(*out.shape[:2], -1)


def rms_norm(x: Float[Array, "*s d"], weight: Float[Array, " d"]) -> Float[Array, "*s d"]:
    """x / sqrt(mean x^2) * weight (arXiv:1910.07467), computed in fp32."""
    size = jnp.square(x.astype(FULL)).mean(-1, keepdims=True)
    return (x.astype(FULL) * jax.lax.rsqrt(size + 1e-6) * weight).astype(x.dtype)

"""MeanFlow's loss in JAX (arXiv:2505.13447, equation 9), at given noise and times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.cases.meanflow.in_jax.dit import DiT
from benchmarks.cases.meanflow.in_jax.layers import FULL, Implementation, nested
from benchmarks.cases.meanflow.in_jax.unet import UNet
from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import DiTConfig, ModelConfig, UNetConfig

Network = Callable[..., Float[Array, "b h w c"]]
Batch = Mapping[str, jax.Array]  # data x and noise e (b, h, w, c), times t and r (b,)


def network_of(config: ModelConfig, arrays: Mapping[str, np.ndarray], dtype: str = FULL) -> UNet | DiT:
    """Return the network of a configuration with PyTorch's parameters, or with gradients in their place.

    Args:
        config: of a `UNet` or a `DiT` without classes, decoupled blocks or dropout.
        arrays: parameters, and of a `UNet` its frequencies, by name.
        dtype: of the products; the weights stay fp32.

    Raises:
        ConfigError: for another network.

    """
    weights = nested(arrays)
    if isinstance(config, UNetConfig):
        return UNet(weights, dtype)
    if isinstance(config, DiTConfig) and not config.decoupled_blocks:
        return DiT(weights, dtype, config)
    raise ConfigError(f"model={config.name}: expected a U-Net or a DiT without decoupled blocks")


@dataclass(frozen=True)
class JaxLoss:
    """E[w ||u(z_t, r, t) - sg(u_tgt)||^2] with the adaptive weight.

    As in PyTorch's `split="static"`, the first samples have r != t and go through a JVP, the others through a pass of
    their own.
    """

    count: int  # samples with r != t
    weighting_power: float
    weighting_eps: float
    # Of attention in the pass without a derivative in forward mode: xla or cudnn.
    implementation: Implementation = "xla"

    def __call__(self, model: Network, batch: Batch, key: None = None) -> Float[Array, ""]:
        """Return the loss of a batch."""
        x, e, t, r = (batch[name] for name in ("x", "e", "t", "r"))
        time, n = t[:, None, None, None], self.count
        z, v = (1 - time) * x + time * e, e - x
        parts = []
        if n:
            given, along = (z[:n], t[:n]), (v[:n], jnp.ones_like(t[:n]))
            u, dudt = jax.jvp(lambda z, t: model(z, r[:n], t), given, along)
            parts.append((u, v[:n] - (t - r)[:n, None, None, None] * dudt.astype(FULL)))
        if n < len(x):
            parts.append((model(z[n:], t[n:], t[n:], self.implementation), v[n:]))
        errors = jnp.concatenate([self._errors(u, target) for u, target in parts])
        return (errors * (jax.lax.stop_gradient(errors) + self.weighting_eps) ** -self.weighting_power).mean()

    def _errors(self, u: Float[Array, "n h w c"], target: Float[Array, "n h w c"]) -> Float[Array, " n"]:
        """Return each sample's squared error, summed over its elements."""
        return jnp.square(u.astype(FULL) - jax.lax.stop_gradient(target)).sum((1, 2, 3))

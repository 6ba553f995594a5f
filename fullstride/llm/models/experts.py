"""Mixture of experts: a router chooses some of a layer's MLPs for each token (arXiv:1701.06538, arXiv:2401.04088)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.models.layer_parts import gate, norm
from fullstride.llm.models.parameters import Layer

# Products of rows grouped by expert with each expert's matrix, (out, in).
GROUPED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def routed(
    config: ModelConfig, kernels: Kernels, layer: Layer, x: Float[Array, "T hidden"]
) -> Float[Array, "T hidden"]:
    """x plus the weighted sum of the chosen experts' outputs; see `chosen` for the weights."""
    assert layer.mlp_norm is not None
    assert layer.router is not None
    normal = norm(config, x, layer.mlp_norm)
    weights, experts = chosen(config, kernels.project(normal, layer.router, bias=layer.router_bias))
    rows = jnp.repeat(normal, config.experts_per_token, axis=0)
    out = _apart(config, layer, rows, experts.reshape(-1)).reshape(*experts.shape, -1)
    return x + jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)


def chosen(
    config: ModelConfig, scores: Float[Array, "T experts"]
) -> tuple[Float[Array, "T chosen"], Int[Array, "T chosen"]]:
    """Choose the most probable experts of each token: their probabilities, fp32, over all experts or over these."""
    weights, experts = lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), config.experts_per_token)
    return weights / weights.sum(-1, keepdims=True) if config.shared_weights else weights, experts


def _apart(
    config: ModelConfig, layer: Layer, rows: Float[Array, "R hidden"], experts: Int[Array, " R"]
) -> Float[Array, "R hidden"]:
    """Each row through its own expert.

    Few rows read their own experts' matrices alone; of many, most experts are read anyway, each once.
    """
    if len(rows) <= config.experts:
        wide = _biased(_product("ri,roi->ro", rows, layer.gate_up[experts]), layer.gate_up_bias, experts)
        return _biased(_product("ri,roi->ro", gate(config, wide), layer.down[experts]), layer.down_bias, experts)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=config.experts).astype(jnp.int32)
    wide = _biased(_ragged(rows[order], layer.gate_up, sizes), layer.gate_up_bias, experts[order])
    out = _biased(_ragged(gate(config, wide), layer.down, sizes), layer.down_bias, experts[order])
    return jnp.zeros_like(out).at[order].set(out)


def _biased(x: Array, biases: Array | None, experts: Array) -> Array:
    return x if biases is None else x + biases[experts]


def _product(equation: str, x: Array, matrices: Array) -> Array:
    return jnp.einsum(equation, x, matrices, precision=_precision(x), preferred_element_type=x.dtype)


def _ragged(x: Array, matrices: Array, sizes: Array) -> Array:
    return lax.ragged_dot_general(x, matrices, sizes, GROUPED, precision=_precision(x), preferred_element_type=x.dtype)


def _precision(x: Array) -> lax.Precision | None:
    # TF32 would be a silent loss for whoever asked for fp32.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

"""Parameters on the device, in the form that a step reads: q, k, v in one matrix, gate and up in another."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from fullstride.llm.config import FUSED, ModelConfig, expert_names
from fullstride.llm.models.adapters import LayerAdapters
from fullstride.llm.models.packing import PackedReader, Packing
from fullstride.llm.models.tensor_parallel import ShardReader
from fullstride.llm.packed.matrix import PackedMatrix, Weight
from fullstride.llm.progress import OnProgress


class Layer(NamedTuple):
    """Parameters of one layer; all matrices are (out, in), and with a router those of the MLP one for each expert.

    `gate_up` and `down` are a `Weight` each, or arrays (experts, out, in).

    `adapters` are slots for LoRA adapters, by the names of the matrices that they change.
    """

    attn_norm: Float[Array, " hidden"] | None
    qkv: Weight
    o: Weight
    mlp_norm: Float[Array, " hidden"] | None
    gate_up: Any
    down: Any
    qkv_bias: Float[Array, " wide"] | None = None
    q_norm: Float[Array, " q_width"] | None = None
    k_norm: Float[Array, " k_width"] | None = None
    attn_post_norm: Float[Array, " hidden"] | None = None
    mlp_post_norm: Float[Array, " hidden"] | None = None
    router: Float[Array, "experts hidden"] | None = None
    router_bias: Float[Array, " experts"] | None = None
    gate_up_bias: Float[Array, "experts double"] | None = None
    down_bias: Float[Array, "experts hidden"] | None = None
    o_bias: Float[Array, " hidden"] | None = None
    sinks: Float[Array, " heads"] | None = None
    adapters: LayerAdapters | None = None


class Weights(NamedTuple):
    """Parameters of a model; `head` is None if it is the embedding, `packed` is a kernel set's own copy."""

    embed: Float[Array, "vocab hidden"] | PackedMatrix
    norm: Float[Array, " hidden"]
    layers: tuple[Layer, ...]
    head: Weight | None = None
    packed: Any = None


def put(
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray],
    dtype: str,
    *devices: Any,
    packing: Packing | None = None,
    loading: OnProgress | None = None,
) -> Weights:
    """Put all parameters on a device, one matrix at a time, so that the host never holds the whole model.

    Args:
        config: configuration of the model, which determines its parameters.
        parameters: arrays by the names of `parameter_shapes`.
        dtype: dtype on the device, by NumPy's or ml_dtypes' name.
        devices: one JAX device; or several, each of which gets its shard and never holds the whole.
        packing: how the matrices are packed; None for numbers of `dtype`.
        loading: callback `(loaded, total)` for layers on the devices.

    Raises:
        ConfigError: if one is missing or has another shape, float16 cannot hold a value, or a device's share of a
            packed one is not of whole blocks.

    """
    reader = ShardReader(config, parameters, dtype, devices)
    place: Any = reader.place if packing is None else PackedReader(reader, parameters, packing).place
    names, layers = _layer_names(config), []
    absent: dict[str, Any] = {} if config.pre_norm else {"attn_norm": None, "mlp_norm": None}
    for i in range(config.layers):
        parts = {name: [f"layers.{i}.{part}" for part in of] for name, of in names.items()}
        made = {name: place(*own) for name, own in parts.items()}
        layers.append(Layer(**{**absent, **_by_expert(config, made)}))
        if loading is not None:
            loading(i + 1, config.layers)
    head = None if config.tied else place("head")
    # Rows of an embedding that is no head are looked up, and tiles are made for products.
    embed: Any = place
    if packing is not None and not config.tied:
        embed = PackedReader(reader, parameters, Packing(packing.name)).place
    return Weights(embed("embed"), place("norm"), tuple(layers), head)


def _layer_names(config: ModelConfig) -> dict[str, list[str]]:
    """Return a layer's arrays, and the parameters that each concatenates."""
    names = ["attn_norm"] * config.pre_norm + ["qkv", "o"] + ["mlp_norm"] * config.pre_norm
    names += ["qkv_bias"] * config.qkv_bias + ["q_norm", "k_norm"] * config.qk_norm
    names += ["attn_post_norm", "mlp_post_norm"] * config.post_norm + ["router"] * (config.experts > 0)
    names += ["router_bias"] * config.expert_bias + ["o_bias"] * config.output_bias + ["sinks"] * config.sinks
    matrices = ["gate_up", "down"] + ["gate_up_bias", "down_bias"] * config.expert_bias
    mlp = {name: expert_names(config, *FUSED.get(name, (name,))) for name in matrices}
    return {name: list(FUSED.get(name, (name,))) for name in names} | mlp


def _by_expert(config: ModelConfig, made: dict[str, Any]) -> dict[str, Any]:
    """Give the matrices of the MLP an axis of experts."""
    if not config.experts:
        return made
    every = ("gate_up", "down", "gate_up_bias", "down_bias")
    return made | {
        name: made[name].reshape(config.experts, -1, *made[name].shape[1:]) for name in every if name in made
    }

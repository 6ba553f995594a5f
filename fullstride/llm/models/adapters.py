"""LoRA adapters (arXiv:2106.09685) of the rows of a step: each row has its own, or none."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from fullstride.llm.config import FUSED, ModelConfig, parameter_shapes
from fullstride.llm.kernels.interface import AXIS, StepBatch
from fullstride.llm.models.tensor_parallel import INPUTS, mesh_of


class AdapterSlots(NamedTuple):
    """Updates (b a)^T of one matrix, one for each slot; the scale of an adapter is in its b."""

    a: Float[Array, "slots rank inner"]
    b: Float[Array, "slots rank out"]


# Of a layer, by the fields of `Layer`.
LayerAdapters = Mapping[str, AdapterSlots]


def empty_slots(config: ModelConfig, slots: int, rank: int, dtype: str, *devices: Any) -> tuple[LayerAdapters, ...]:
    """Allocate slots of zeros for every layer; each part of a fused matrix has `rank` columns of its own.

    Several devices share them as they do the matrices: by outputs the second factors, or by inputs the first ones.
    """
    shapes, whole = parameter_shapes(config), PartitionSpec()
    split = PartitionSpec(None, None, AXIS)

    def zeros(spec: PartitionSpec, *shape: int) -> Array:
        device = devices[0] if len(devices) == 1 else NamedSharding(mesh_of(devices), spec)
        return jnp.zeros(shape, dtype, device=device)

    def layer(index: int) -> LayerAdapters:
        made = {}
        for name in adapted_matrices(config):
            parts = [shapes[f"layers.{index}.{part}"] for part in FUSED.get(name, (name,))]
            wide, out = len(parts) * rank, sum(rows for rows, _ in parts)
            inner, outer = (split, whole) if name in INPUTS else (whole, split)
            made[name] = AdapterSlots(zeros(inner, slots, wide, parts[0][1]), zeros(outer, slots, wide, out))
        return made

    return tuple(layer(index) for index in range(config.layers))


def shard_order(config: ModelConfig, name: str, devices: int) -> np.ndarray:
    """Return the order of a fused matrix's rows in which each device's share of all parts lies together."""
    shapes = parameter_shapes(config)
    sizes = [shapes[f"layers.0.{part}"][0] for part in FUSED.get(name, (name,))]
    if name in INPUTS:
        return np.arange(sizes[0])
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([np.split(part, devices)[i] for i in range(devices) for part in parts])


def adapted_matrices(config: ModelConfig) -> tuple[str, ...]:
    """Return the matrices of a layer that adapters can change: experts are not among them."""
    return ("qkv", "o") if config.experts else ("qkv", "o", "gate_up", "down")


@cache
def fill_slot(a: Sharding, b: Sharding) -> Callable[..., AdapterSlots]:
    """Return a function of slots with these shardings, a number and both factors, that puts them there in place."""

    def fill(
        slots: AdapterSlots, slot: Int[Array, ""], a: Float[Array, "rank inner"], b: Float[Array, "rank out"]
    ) -> AdapterSlots:
        return AdapterSlots(
            slots.a.at[slot].set(a.astype(slots.a.dtype)),
            slots.b.at[slot].set(b.astype(slots.b.dtype)),
        )

    shardings: Any = (a, b)
    return jax.jit(fill, donate_argnums=0, out_shardings=AdapterSlots(*shardings))


def adapted(
    y: Float[Array, "T out"], x: Float[Array, "T inner"], slots: AdapterSlots | None, batch: StepBatch
) -> Float[Array, "T out"]:
    """Add to y the update of each token's row, (x a^T) b; tokens of rows without an adapter keep y, bit for bit.

    All slots are multiplied, and products with other rows' adapters are replaced by zeros between the two factors: two
    products of the slots' ranks together, instead of a copy of both factors for each row.
    """
    if slots is None or batch.adapters is None:
        return y
    rows, tiles = batch.rows.shape[0], batch.tiles.shape[0]
    tile = (x.shape[0] - rows) // max(1, tiles)
    owners = jnp.concatenate([batch.adapters[:rows], jnp.repeat(batch.adapters[rows:], tile)])
    # TF32 would be a silent loss for whoever asked for fp32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=x.dtype)
    own = owners[:, None] == jnp.arange(slots.a.shape[0])
    narrow = jnp.where(own[..., None], product("ti,sri->tsr", x, slots.a), 0)
    return jnp.where((owners >= 0)[:, None], y + product("tsr,sro->to", narrow, slots.b), y)

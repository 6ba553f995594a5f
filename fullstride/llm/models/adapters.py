"""LoRA adapters (arXiv:2106.09685) of the rows of a step: each row has its own, or none."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fullstride.llm.config import FUSED, ModelConfig, parameter_shapes
from fullstride.llm.kernels.interface import StepBatch


class AdapterSlots(NamedTuple):
    """Updates (b a)^T of one matrix, one for each slot; the scale of an adapter is in its b."""

    a: Float[Array, "slots rank inner"]
    b: Float[Array, "slots rank out"]


# Of a layer, by the fields of `Layer`.
LayerAdapters = Mapping[str, AdapterSlots]


def empty_slots(config: ModelConfig, slots: int, rank: int, dtype: str, device: Any) -> tuple[LayerAdapters, ...]:
    """Allocate slots of zeros for every layer; each part of a fused matrix has `rank` columns of its own."""
    shapes = parameter_shapes(config)

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, dtype, device=device)

    def layer(index: int) -> LayerAdapters:
        made = {}
        for name in adapted_matrices(config):
            parts = [shapes[f"layers.{index}.{part}"] for part in FUSED.get(name, (name,))]
            wide = len(parts) * rank
            out = sum(rows for rows, _ in parts)
            made[name] = AdapterSlots(zeros(slots, wide, parts[0][1]), zeros(slots, wide, out))
        return made

    return tuple(layer(index) for index in range(config.layers))


def adapted_matrices(config: ModelConfig) -> tuple[str, ...]:
    """Return the matrices of a layer that adapters can change: experts are not among them."""
    return ("qkv", "o") if config.experts else ("qkv", "o", "gate_up", "down")


@partial(jax.jit, donate_argnums=0)
def fill_slot(
    slots: AdapterSlots, slot: Int[Array, ""], a: Float[Array, "rank inner"], b: Float[Array, "rank out"]
) -> AdapterSlots:
    """Put an update into a slot, in place."""
    return AdapterSlots(
        slots.a.at[slot].set(a.astype(slots.a.dtype)),
        slots.b.at[slot].set(b.astype(slots.b.dtype)),
    )


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

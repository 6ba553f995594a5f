"""State that stays on the device; every step receives it and returns it in the same buffers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import wire
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.kernels import Sampler
from fullstride.llm.kernels.xla.sampling import PROMPT


class EngineState(NamedTuple):
    """Keys and values, and of each row (the last is nobody's, for padding) where it stands.

    Attributes:
        pool: keys and values of all layers, by slot, perhaps as `FP8_POOL`; block 0 is nobody's.
        last: the row's newest token, of which there is no key yet.
        length: tokens that have keys and values.
        alive: the row has not ended.
        params: see `Params`.
        counts: see `Sampler`; of rows with penalties.
        masks: see `Sampler`; of rows with a grammar.
        scratch: of steps that are one operation, for each size that a decode step may have; see `Whole`.

    """

    pool: Num[Array, "layers 2 slots kv_heads head_dim"]
    last: Int[Array, " R"]
    length: Int[Array, " R"]
    alive: Bool[Array, " R"]
    params: Int[Array, "R P"]
    counts: Int[Array, "R V"]
    bias_ids: Int[Array, "R B"]
    bias: Float[Array, "R B"]
    masks: UInt32[Array, "R words"]
    scratch: tuple[Array, ...] = ()


def shapes(model: ModelConfig, sizes: CompiledShapes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what is zero at first, in order."""
    rows, vocab = sizes.rows + 1, model.vocab_size
    return {
        "pool": ((model.layers, 2, (sizes.blocks + 1) * sizes.block, model.kv_heads, model.head_dim), sizes.pool),
        "last": ((rows,), "int32"),
        "length": ((rows,), "int32"),
        "alive": ((rows,), "bool"),
        "params": ((rows, wire.PARAMS.size), "int32"),
        "counts": ((rows, vocab), "int32"),
        "bias_ids": ((rows, wire.BIASES), "int32"),
        "bias": ((rows, wire.BIASES), "float32"),
        "masks": ((rows, -(-vocab // 32)), "uint32"),
    }


def sampler(state: EngineState, slots: Int[Array, " D"], position: Int[Array, " D"]) -> Sampler:
    """Return the sampling inputs of these rows; the new token will be at `position`."""
    own = wire.RowParams.of(state.params[slots])
    numbers = lax.bitcast_convert_type(own.numbers, jnp.float32)
    return Sampler(
        position=position,
        key=lax.bitcast_convert_type(own.key, jnp.uint32),
        top_k=own.top_k,
        special=own.flags & wire.SPECIAL > 0,
        stops=own.stops,
        min_until=own.min_until,
        slots=slots,
        counts=state.counts,
        bias_ids=state.bias_ids,
        bias=state.bias,
        masked=own.flags & wire.MASKED > 0,
        masks=state.masks,
        wanted=own.flags & wire.WANTED > 0,
        **{name: numbers[:, i] for i, name in enumerate(wire.NUMBERS)},
    )


def set_history(state: EngineState, packed: Any) -> EngineState:
    """Set a row's counts and biases, for requests that are `special`; `packed` is laid out as `HISTORY`."""
    given = wire.HISTORY.of(packed)
    slot, prompt, tokens = given["row"], given["prompt"], given["tokens"]
    place = jnp.arange(tokens.shape[0])
    vocab = state.counts.shape[1]
    known = jnp.where(tokens < 0, vocab, tokens)
    said = jnp.zeros(vocab, jnp.int32).at[jnp.where(place < prompt, vocab, known)].add(1, mode="drop")
    seen = jnp.zeros(vocab, jnp.int32).at[jnp.where(place < prompt, known, vocab)].set(PROMPT, mode="drop")
    return state._replace(
        counts=state.counts.at[slot].set(said + seen),
        bias_ids=state.bias_ids.at[slot].set(given["bias_ids"]),
        bias=state.bias.at[slot].set(lax.bitcast_convert_type(given["bias"], jnp.float32)),
    )


def set_mask(state: EngineState, packed: Any) -> EngineState:
    """Set a row's mask; `packed` is laid out as `MASK`."""
    given = wire.MASK.of(packed)
    mask = lax.bitcast_convert_type(given["bits"], jnp.uint32)
    return state._replace(masks=state.masks.at[given["row"]].set(mask))

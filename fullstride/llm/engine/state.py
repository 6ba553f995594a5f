"""State that stays on the device; every step receives it and returns it in the same buffers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import wire
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.kernels.fp8_pool import whole_blocks
from fullstride.llm.kernels.interface import Sampler
from fullstride.llm.kernels.xla.sampling import PROMPT


class EngineState(NamedTuple):
    """KV cache, and the progress of each row; the last row is for padding.

    Attributes:
        pool: KV cache of the layers of a group, by slot, possibly an `fp8_pool`; block 0 is scratch.
        last: newest token of each row, which has no key yet.
        length: number of tokens with keys and values.
        alive: whether the row has not ended.
        params: parameters of each row; see `wire.RowParams`.
        counts: token counts of rows with penalties; see `Sampler`.
        masks: token masks of rows with a grammar; see `Sampler`.
        scratch: scratch memory of fused steps, for each size of a decode step; see `FusedStep`.

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
    """Return shape and dtype of the arrays that start as zeros, in order."""
    rows, vocab = sizes.rows + 1, model.vocab_size
    layers = max(map(len, model.cache_groups))
    slots = whole_blocks(sizes.blocks + 1, sizes.pool, model.head_dim) * sizes.block
    return {
        "pool": ((layers, 2, slots, model.kv_heads, model.head_dim), sizes.pool),
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

"""A whole decode step in one launch: the next token's logits of up to 16 rows, at the speed at which weights are read.

A step of few rows reads every weight once and computes almost nothing, so that what it waits for is what it costs: in a
step of separate kernels each of five per layer waits for the one before it, and the memory for all of them. Here blocks
stay on the GPU, all weights are one stream that the copy engine keeps running, and what blocks tell each other is its
own signal (see `token_rows.cuh`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt32

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda.launch import Kernel, call
from fullstride.llm.kernels.interface import FusedStep, StepBatch
from fullstride.llm.models.parameters import Weights

FILES = ("sizes.cuh", "stream.cuh", "rows.cuh", "products.cuh", "attention.cuh", "mix.cuh")
MOST_ROWS = 16
WARPS, UNIT, MOST_UNITS, MOST_SPLITS = 8, 8, 6, 16
THREADS, HEADER_WORDS, TABLE_WORDS = 384, 32, 1024
# Bytes of a block's shared memory on a Hopper GPU, and of a block of threads' own use.
SHARED = 227 << 10
# Bytes of the two barriers of a slot of the ring.
BARRIERS = 16
# Cycles that a layer's phases take at least, one after the other, and bytes that the memory gives a block in a cycle.
LAYER_CYCLES, MEMORY_PACE = 20_000, 16
# What stands where nothing has been written: no arithmetic gives it.
NOT_YET = 0xFFFFFFFF


class PackedWeights(NamedTuple):
    """Weights in the order in which blocks read them; norms' weights are part of the matrices behind them.

    Attributes:
        qkv, output, gate_up, down: of all layers; a unit is 8 outputs, a chunk what a slot of the ring holds.
        norms: of queries, then keys; ones where the model has none.

    """

    qkv: BFloat16[Array, "layers units chunks numbers"]
    output: BFloat16[Array, "layers units chunks numbers"]
    gate_up: BFloat16[Array, "layers units chunks numbers"]
    down: BFloat16[Array, "layers units chunks numbers"]
    head: BFloat16[Array, "units chunks numbers"]
    norms: Float[Array, "layers width"]
    bias: Float[Array, "layers wide"]


class TokenSizes(NamedTuple):
    """Sizes that the kernel is compiled for, in addition to the model's.

    Attributes:
        rows: decode rows of a step, 1 to 8 or 16.
        slots: token slots of the KV cache.
        blocks: thread blocks, all of which must be resident on the GPU at once.

    """

    rows: int
    block: int
    slots: int
    blocks: int


def refusal(config: ModelConfig) -> str | None:
    """Return why the kernel does not support a model, or None if it does."""
    inner = (config.hidden_size, config.heads * config.head_dim, config.intermediate_size)
    if any(size % 256 for size in inner):
        return f"hidden size, heads and intermediate size {inner} are not all multiples of 256"
    if config.head_dim not in (64, 128):
        return f"head_dim is {config.head_dim}, expected 64 or 128"
    if config.heads % config.kv_heads or config.heads // config.kv_heads > 7:
        return f"{config.heads} query heads share {config.kv_heads} key heads; expected at most 7 per key head"
    if config.vocab_size % UNIT:
        return f"vocab_size is {config.vocab_size}, expected a multiple of {UNIT}"
    return None


def chunk_steps(inputs: int) -> int:
    """Steps of 16 inputs that a slot of the ring holds."""
    return next(steps for steps in (64, 48, 32, 16) if inputs // 16 % steps == 0)


@partial(jax.jit, static_argnames="paired")
def pack(
    weight: Float[Array, "out inputs"], norm: Float[Array, " inputs"] | None = None, paired: bool = False
) -> BFloat16[Array, "units chunks numbers"]:
    """Units of 8 outputs as the second operand of mma.m16n8k16: a lane's 16 bytes are its words of two steps.

    Args:
        weight: of a projection.
        norm: weights of the norm before it.
        paired: the outputs are gates and then as many others; they stand side by side.

    """
    out, inputs = weight.shape
    if norm is not None:
        weight = (weight.astype(jnp.float32) * norm.astype(jnp.float32)).astype(weight.dtype)
    if paired:
        weight = weight.reshape(2, out // 2, inputs).swapaxes(0, 1).reshape(out, inputs)
    steps = chunk_steps(inputs)
    # Outputs; chunks, pairs of steps, steps, halves, pairs of inputs, inputs.
    split = weight.reshape(out // UNIT, UNIT, inputs // 16 // steps, steps // 2, 2, 2, 4, 2)
    return split.transpose(0, 2, 3, 1, 6, 4, 5, 7).reshape(out // UNIT, inputs // 16 // steps, steps * 128)


def pack_all(config: ModelConfig, weights: Weights) -> PackedWeights:
    """Pack a second copy of all weights, for this kernel."""
    layers = weights.layers
    head = weights.embed if weights.head is None else weights.head
    ones = jnp.ones(config.head_dim, jnp.float32)
    wide = (config.heads + 2 * config.kv_heads) * config.head_dim
    norms = [[ones if w is None else w.astype(jnp.float32) for w in (x.q_norm, x.k_norm)] for x in layers]
    shifts = [jnp.zeros(wide) if x.qkv_bias is None else x.qkv_bias.astype(jnp.float32) for x in layers]
    return PackedWeights(
        jnp.stack([pack(x.qkv, x.attn_norm) for x in layers]),
        jnp.stack([pack(x.o) for x in layers]),
        jnp.stack([pack(x.gate_up, x.mlp_norm, paired=True) for x in layers]),
        jnp.stack([pack(x.down) for x in layers]),
        pack(head, weights.norm),
        jnp.stack([jnp.concatenate(pair) for pair in norms]),
        jnp.stack(shifts),
    )


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the projections."""
    mixed, hidden, inner = config.heads * config.head_dim, config.hidden_size, config.intermediate_size
    return {
        "qkv": (hidden, mixed + 2 * config.kv_heads * config.head_dim),
        "output": (mixed, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def shared_words(config: ModelConfig, sizes: TokenSizes) -> dict[str, int]:
    """Words of the parts of a block's shared memory behind the ring, in the order of `make_block` in `token.cu`."""
    group, units = config.heads // config.kv_heads, -(-config.hidden_size // UNIT)
    return {
        "sums": 2 * WARPS * MOST_UNITS * sizes.rows * UNIT,  # two, by turns
        "heads": (group + 2) * config.head_dim // 2,
        "squares": 2 * WARPS * sizes.rows,  # two, by turns
        "mix": WARPS * group * (2 + 9 * config.head_dim // 8),
        "angles": sizes.rows * config.head_dim,
        "norms": 2 * config.head_dim,
        "residual": -(-units // sizes.blocks) * sizes.rows * UNIT,
        "table": TABLE_WORDS,
        "layer": 4,
    }


def pace(config: ModelConfig, blocks: int) -> int:
    """Bytes of weights that a block asks for in a cycle so that a layer's come as it needs them; 0 for no limit."""
    numbers = sum(inputs * outputs for inputs, outputs in matrices(config).values())
    needed = -(-2 * numbers // (blocks * LAYER_CYCLES))
    return needed if needed < MEMORY_PACE else 0


def kernel(config: ModelConfig, sizes: TokenSizes) -> Kernel:
    """The kernel with as long a ring as there is room for."""
    slot = max(chunk_steps(inputs) * 256 for inputs, _ in matrices(config).values()) + BARRIERS
    fixed = 4 * sum(shared_words(config, sizes).values())
    ring = (SHARED - fixed) // slot
    constants = {
        "ROWS": sizes.rows,
        "HIDDEN": config.hidden_size,
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "INNER": config.intermediate_size,
        "VOCAB": config.vocab_size,
        "LAYERS": config.layers,
        "BLOCK": sizes.block,
        "SLOTS": sizes.slots,
        "GRID": sizes.blocks,
        "QK_NORM": int(config.qk_norm),
        "QKV_BIAS": int(config.qkv_bias),
        "RMS_EPS": config.rms_eps,
        "SCALE": config.head_dim**-0.5,
        "RING": ring,
        "PACE": pace(config, sizes.blocks),
    }
    files = tuple(f"token_{file}" for file in FILES)
    return Kernel("token", (*files, "silu.cuh", "token.cu"), tuple(constants.items()), THREADS, ring * slot + fixed)


def scratch_words(config: ModelConfig, rows: int, blocks: int) -> int:
    """Words that blocks tell each other things by: see `token_sizes.cuh`."""
    mixed, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    splits = max(1, min(MOST_SPLITS, blocks // (rows * config.kv_heads)))
    parts = rows * config.heads * splits * (config.head_dim + 2)
    bf16 = rows * (mixed + 2 * config.hidden_size + config.intermediate_size) // 2
    return HEADER_WORDS + 2 * config.layers * (rows * (mixed + 2 * kv) + bf16 + parts)


def fresh_scratch(config: ModelConfig, rows: int, blocks: int) -> UInt32[Array, " words"]:
    """Nothing has been said yet, and it is the first set's turn."""
    return jnp.full(scratch_words(config, rows, blocks), NOT_YET, jnp.uint32).at[0].set(0)


def logits(
    config: ModelConfig,
    packed: PackedWeights,
    embed: BFloat16[Array, "vocab hidden"],
    pool: BFloat16[Array, "layers 2 slots kv_heads head_dim"],
    scratch: UInt32[Array, " words"],
    batch: StepBatch,
    block: int,
    *,
    blocks: int,
) -> tuple[Float[Array, "D vocab"], Array, UInt32[Array, " words"]]:
    """Scores of the tokens after those of the batch, whose keys and values go into the pool.

    Args:
        config: of the model; see `refusal`.
        packed: weights.
        embed: table of embeddings.
        pool: keys and values, replaced in place.
        scratch: of this number of rows, from `fresh_scratch` or the step before.
        batch: of decode rows alone; rows at position -1 give no scores that mean anything.
        block: tokens of a block of the pool.
        blocks: of threads.

    """
    asked, width = batch.rows.shape
    rows = padded(asked)
    made = kernel(config, TokenSizes(rows, block, pool.shape[2], blocks))
    given = (batch.tokens, batch.positions, batch.slots, batch.rows, batch.cos, batch.sin)
    fills = (0, -1, 0, 0, 0, 0)
    more = (
        jnp.pad(x, ((0, rows - asked), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
        for x, fill in zip(given, fills, strict=True)
    )
    # The width alone would be no reason to compile another kernel.
    operands = (*more, embed, *packed, jnp.full(1, width, jnp.int32))
    results = [jax.ShapeDtypeStruct((rows, config.vocab_size), jnp.float32)]
    results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool, scratch)]
    first = len(operands)
    found = call(made, (blocks, 1, 1), (*operands, pool, scratch), results, {first: 1, first + 1: 2})
    return found[0][:asked], found[1], found[2]


def padded(rows: int) -> int:
    """Rows of mma's first operand are read eight at a time."""
    return rows if rows <= 8 else 16


def blocks(config: ModelConfig, processors: int) -> int:
    """Blocks of threads on a GPU with that many multiprocessors: each has units of all matrices but the narrow ones."""
    return min(processors, *(out // UNIT for _, out in matrices(config).values() if out != config.hidden_size))


def fused_step(config: ModelConfig, processors: int) -> FusedStep:
    """The operation for a model and a GPU with that many multiprocessors, each of which gets a block."""
    count = blocks(config, processors)
    return FusedStep(
        MOST_ROWS,
        partial(pack_all, config),
        lambda rows: fresh_scratch(config, padded(rows), count),
        partial(logits, config, blocks=count),
    )

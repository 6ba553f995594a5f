"""Layers of a decode step of up to 128 rows as one chain, with five kernels per layer.

Each product waits for the one before it; with all of its weights under way before, what a step costs comes nearer to
what it reads. See `chain.py` and `product.cu`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Num

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda.attention import decode_kernel
from fullstride.llm.kernels.cuda.chain import ChainLaunch, chain
from fullstride.llm.kernels.cuda.launch import Kernel
from fullstride.llm.kernels.cuda.product import MOST_ROWS, SQUARES, Product, arranged, kernel, sizes, slabs
from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, FusedLayers, StepBatch
from fullstride.llm.models.parameters import Weights

Pool = Num[Array, "layers 2 slots kv_heads head_dim"]
# Of a layer's arrays: which operand, and bytes from its start.
_Places = dict[str, tuple[int, int]]


def products(config: ModelConfig, rows: int) -> dict[str, Product]:
    """Return the matrix products of a layer, by name."""
    hidden, inner, mixed = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    wide = mixed + 2 * config.kv_heads * config.head_dim
    return {
        "qkv": Product(rows, hidden, wide, eps=config.rms_eps, bias=config.qkv_bias),
        "o": Product(rows, mixed, hidden, residual=True),
        "gate_up": Product(rows, hidden, 2 * inner, eps=config.rms_eps, gated=True),
        "down": Product(rows, inner, hidden, residual=True),
    }


def most_rows(config: ModelConfig) -> int:
    """Return the largest number of rows that the chain supports; 0 if it does not support the model."""
    fits = [rows for rows in range(32, MOST_ROWS + 1, 32) if all(map(sizes, products(config, rows).values()))]
    return max(fits, default=0)


def run(
    config: ModelConfig, weights: Weights, x: BFloat16[Array, "D hidden"], pool: Pool, batch: StepBatch, block: int
) -> tuple[BFloat16[Array, "D hidden"], Pool]:
    """Compute the last layer's output for rows of one token each, and the KV cache with their keys and values.

    Args:
        config: the model's configuration; see `most_rows`.
        weights: all of the model's weights.
        x: embeddings of the rows' tokens.
        pool: KV cache, updated in place.
        batch: step batch with decode rows only.
        block: tokens of a KV cache block.

    """
    rows = x.shape[0]
    mixed = config.heads * config.head_dim
    wide = mixed + 2 * config.kv_heads * config.head_dim
    first = weights.layers[0].attn_norm
    assert first is not None, "a set that has this is refused for a model without norms before its layers"
    squares: Float[Array, "D parts"] = jnp.square(x.astype(jnp.float32)).reshape(rows, -1, SQUARES).sum(-1)
    # What the links write; those that stand here with an operand begin as that.
    written = {"x": x, "pool": pool, "scaled": arranged(x * first), "squares": squares}
    high = slabs(rows) * 64
    between = {"qkv": (rows, wide), "mixed": (high, mixed), "inner": (high, config.intermediate_size)}
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in written.values()]
    results += [jax.ShapeDtypeStruct(size, x.dtype) for size in between.values()]
    operands = list(written.values())
    links = _links(config, weights, pool, batch, block, operands, [*written, *between])
    done = chain(links, operands, results, {i: i for i in range(len(written))})
    return done[0], done[1]


def _links(
    config: ModelConfig,
    weights: Weights,
    pool: Pool,
    batch: StepBatch,
    block: int,
    operands: list[Array],
    names: list[str],
) -> list[ChainLaunch]:
    """The launches, and behind the operands that are there what else they read; `names` are the results'."""

    def place(array: Array) -> int:
        operands.append(array)
        return len(operands) - 1

    rows, table = batch.rows.shape
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, block, config.head_dim**-0.5, config.rms_eps)
    given = [jnp.arange(config.layers, dtype=jnp.int32), batch.positions, batch.slots, batch.rows, batch.cos, batch.sin]
    index, *told = map(place, given)
    # What a model does without is not looked at.
    nothing = place(jnp.zeros(8, jnp.bfloat16))
    own: list[_Places] = [
        {name: (nothing if array is None else place(array), 0) for name, array in layer._asdict().items()}
        for layer in weights.layers
    ]
    # The norm behind each layer is the next one's, or the model's last.
    after = [*(layer["attn_norm"] for layer in own), (place(weights.norm), 0)][1:]
    # All operands are known: the results come behind them.
    at = {name: (len(operands) + i, 0) for i, name in enumerate(names)}
    made: dict[str, tuple[Kernel, tuple[int, int, int]]] = {}
    for name, each in products(config, rows).items():
        if (division := sizes(each)) is None:
            raise ValueError(f"no division of {each} fits a block's shared memory; set kernels=paged")
        made[name] = kernel(each, division)
    attention = decode_kernel(rows, table, pool.shape[2], shape, config.qk_norm, slabs(rows), pool.dtype == FP8_POOL)

    def product(name: str, x: str, layer: _Places, norm: tuple[int, int], out: str) -> ChainLaunch:
        bias = layer["qkv_bias"] if name == "qkv" else (nothing, 0)
        return ChainLaunch(
            *made[name], (at[x], layer[name], at["squares"], bias, norm, at[out], at["scaled"], at["squares"])
        )

    links = []
    for number, layer in enumerate(own):
        norms = (layer["q_norm"], layer["k_norm"], (nothing, 0))
        context = ((index, 4 * number), *((place, 0) for place in told), *norms)
        links += [
            product("qkv", "scaled", layer, (nothing, 0), "qkv"),
            ChainLaunch(*attention, (at["qkv"], at["pool"], *context, at["mixed"], at["pool"])),
            product("o", "mixed", layer, layer["mlp_norm"], "x"),
            product("gate_up", "scaled", layer, (nothing, 0), "inner"),
            product("down", "inner", layer, after[number], "x"),
        ]
    return links


def layers(config: ModelConfig) -> FusedLayers | None:
    """For a model, or None if its sizes do not allow it."""
    rows = most_rows(config)
    return FusedLayers(rows, partial(run, config)) if rows else None

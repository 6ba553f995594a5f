"""Products of few rows with packed matrices at the speed at which their codes are read: see `packed_product.cu`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fullstride.llm.kernels.cuda.launch import Kernel, call
from fullstride.llm.kernels.cuda.target import HOPPER, Target
from fullstride.llm.packed.formats import FORMATS, TILE_INPUTS, TILE_OUTPUTS
from fullstride.llm.packed.matrix import PackedMatrix, product

FILES = ("packed_codes.cuh", "packed_product.cu")
# Rows of a launch, and up to which number of rows several launches read fewer bytes than unpacking writes.
ROWS, MOST_ROWS = 64, 256
WARPS, MOST_STAGES = 8, 4
# Thread blocks that keep the memory of a Hopper GPU busy: nearly two on each multiprocessor.
BLOCKS = 240
# Kinds of records in `packed_codes.cuh`, by formats; those with 4-bit codes and a code of zero are kind 2.
KINDS = {"Q4_0": 0, "Q8_0": 0, "Q4_1": 1, "fp8": 3, "fp8_128": 3, "Q4_K": 4, "Q6_K": 5}


class PackedProduct(NamedTuple):
    """Sizes of a product: rows, inputs and outputs, and the matrix's format."""

    rows: int
    inputs: int
    outputs: int
    format: str


class Division(NamedTuple):
    """Division of a product.

    Attributes:
        n_tiles: times 8 rows of a block, which are also its warps with different outputs.
        m_tiles: times 16 outputs of a warp.
        splits: thread blocks that share the inputs of the same outputs.

    """

    n_tiles: int
    m_tiles: int
    splits: int


def division(product: PackedProduct) -> Division:
    """Return the division: enough blocks to keep the memory busy, and at least two rounds of inputs in each."""
    n_tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= product.rows)
    steps, rounds = product.inputs // TILE_INPUTS, 2 * WARPS // n_tiles
    most = [splits for splits in (1, 2, 4, 8) if splits == 1 or steps >= splits * rounds]
    # Warps with two tiles read rows half as often.
    m_tiles = 2 if product.outputs // (TILE_OUTPUTS * n_tiles * 2) * most[-1] >= BLOCKS else 1
    blocks = -(-product.outputs // (TILE_OUTPUTS * n_tiles * m_tiles))
    return Division(n_tiles, m_tiles, next((splits for splits in most if blocks * splits >= BLOCKS), most[-1]))


def kernel(product: PackedProduct, division: Division, target: Target = HOPPER) -> tuple[Kernel, tuple[int, int, int]]:
    """Return the kernel and its grid; its parameters: x, codes, records; out (splits, rows, outputs), fp32."""
    form = FORMATS[product.format]
    stages, shared = _memory(form.bits, division, target.shared)
    constants = {
        "COUNT": product.rows,
        "IN": product.inputs,
        "OUT": product.outputs,
        "KIND": KINDS.get(form.name, 2),
        "BITS": form.bits,
        "BLOCK": form.block,
        "RECORD": form.record,
        "ZERO": form.zero if form.bits < 8 else 0,
        "MINIMA": int(form.minima),
        "N_TILES": division.n_tiles,
        "M_TILES": division.m_tiles,
        "SPLITS": division.splits,
        "STAGES": stages,
    }
    made = Kernel("packed_product", FILES, tuple(constants.items()), 32 * WARPS, shared, target)
    columns = TILE_OUTPUTS * division.n_tiles * division.m_tiles
    return made, (-(-product.outputs // columns), division.splits, 1)


def _memory(bits: int, division: Division, most: int) -> tuple[int, int]:
    """Return the number of stages, and the bytes of them and the sums of inputs: half of the most, or two stages.

    In their place the sums of products stand at the end.
    """
    tokens, warps = 8 * division.n_tiles, WARPS // division.n_tiles
    rows, codes = warps * tokens * TILE_INPUTS * 2, WARPS * division.m_tiles * TILE_OUTPUTS * TILE_INPUTS * bits // 8
    sums = warps * tokens * (TILE_OUTPUTS * division.n_tiles * division.m_tiles + 4) * 4
    inputs = warps * 4 * tokens * 4
    stages = max(2, min(MOST_STAGES, (most // 2 - inputs) // (rows + codes)))
    return stages, max(stages * (rows + codes) + inputs, sums)


def packed_product(
    x: Float[Array, "T inner"], matrix: PackedMatrix, kind: DTypeLike, target: Target = HOPPER
) -> Float[Array, "T out"]:
    """x W^T, the result of dtype `kind`; in plain JAX where the kernel does not apply."""
    if not matrix.tiled or x.dtype != jnp.bfloat16 or len(x) > MOST_ROWS:
        return product(x, matrix, kind)
    parts = [_launch(x[start : start + ROWS], matrix, target) for start in range(0, len(x), ROWS)]
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).astype(kind)


def _launch(x: Float[Array, "T inner"], matrix: PackedMatrix, target: Target) -> Float[Array, "T out"]:
    asked = PackedProduct(len(x), x.shape[1], matrix.shape[0], matrix.format)
    made, grid = kernel(asked, division(asked), target)
    result = jax.ShapeDtypeStruct((grid[1], asked.rows, asked.outputs), jnp.float32)
    return call(made, grid, [x, matrix.codes, matrix.records], [result])[0].sum(0)

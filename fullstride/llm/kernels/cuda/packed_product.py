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
# Thread blocks that a Hopper GPU runs at once, two on each multiprocessor, and those that keep its memory busy; blocks
# that there should be if their warps have one tile or two.
RESIDENT, BUSY = 264, 120
ENOUGH = {2: 180, 1: 240}
# Kinds of records in `packed_codes.cuh`, by formats; those with 4-bit codes and a code of zero are kind 2.
KINDS = {"Q4_0": 0, "Q8_0": 0, "Q4_1": 1, "fp8": 3, "fp8_128": 3, "Q4_K": 4, "Q6_K": 5}


class PackedProduct(NamedTuple):
    """Sizes of a product: rows, inputs and outputs, the matrix's format, and whether the result is bf16 or fp32."""

    rows: int
    inputs: int
    outputs: int
    format: str
    rounded: bool = False


class Division(NamedTuple):
    """Division of a product.

    Attributes:
        n_tiles: times 8 rows.
        m_tiles: times 16 outputs of a warp.
        team: warps of a block with different outputs, which share the rows that they read.
        splits: thread blocks that share the inputs of the same outputs, whose sums are fp32.

    """

    n_tiles: int
    m_tiles: int
    team: int
    splits: int = 1


def division(product: PackedProduct) -> Division:
    """Return the division: the more outputs share what is read of rows the better, if enough blocks are left.

    Teams of as many warps as there are parts of 8 rows, or more, fit into shared memory. With 64 rows a warp has no
    registers for two tiles. Where outputs are few, blocks share the inputs, of which each has two rounds at least.
    """
    n_tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= product.rows)
    teams = [team for team in (8, 4, 2, 1) if team >= n_tiles]
    for m_tiles, least in ENOUGH.items() if n_tiles < 8 else ():
        for team in teams:
            if _groups(product, m_tiles, team) >= least:
                return Division(n_tiles, m_tiles, team)
    steps, rounds, groups = product.inputs // TILE_INPUTS, 2 * WARPS // n_tiles, _groups(product, 1, n_tiles)
    most = [splits for splits in (1, 2, 3, 4, 6, 8) if splits == 1 or steps >= splits * rounds]
    return Division(n_tiles, 1, n_tiles, next((splits for splits in most if groups * splits >= BUSY), most[-1]))


def _groups(product: PackedProduct, m_tiles: int, team: int) -> int:
    """Return the number of groups of outputs, of which a block has one at a time."""
    return -(-product.outputs // (TILE_OUTPUTS * m_tiles * team))


def kernel(product: PackedProduct, division: Division, target: Target = HOPPER) -> tuple[Kernel, tuple[int, int, int]]:
    """Return the kernel and its grid; its parameters: x, codes, records; out (splits, rows, outputs)."""
    form = FORMATS[product.format]
    stages, shared = _memory(product, division, target.shared)
    # As many groups for each block as there must be for any.
    groups = _groups(product, division.m_tiles, division.team)
    blocks = -(-groups // -(-groups // RESIDENT))
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
        "TEAM": division.team,
        "SPLITS": division.splits,
        "STAGES": stages,
        "GRID": blocks,
        "EXACT": int(not product.rounded),
    }
    made = Kernel("packed_product", FILES, tuple(constants.items()), 32 * WARPS, shared, target)
    return made, (blocks, division.splits, 1)


def _memory(product: PackedProduct, division: Division, most: int) -> tuple[int, int]:
    """Return the number of stages, and the bytes of them and of the sums of products and inputs."""
    form, tokens, teams = FORMATS[product.format], 8 * division.n_tiles, WARPS // division.team
    records = TILE_OUTPUTS * form.record * max(1, TILE_INPUTS // (form.block or TILE_INPUTS))
    weights = WARPS * division.m_tiles * (TILE_OUTPUTS * TILE_INPUTS * form.bits // 8 + records)
    stage = teams * product.rows * TILE_INPUTS * 2 + weights
    sums = teams * tokens * (TILE_OUTPUTS * division.team * division.m_tiles + 4 + 4) * 4
    stages = max(2, min(MOST_STAGES, (most // 2 - sums) // stage))
    return stages, stages * stage + sums


def packed_product(
    x: Float[Array, "T inner"], matrix: PackedMatrix, kind: DTypeLike, target: Target = HOPPER
) -> Float[Array, "T out"]:
    """x W^T, the result of dtype `kind`; in plain JAX where the kernel does not apply."""
    if not matrix.tiled or x.dtype != jnp.bfloat16 or len(x) > MOST_ROWS:
        return product(x, matrix, kind)
    parts = [_launch(x[start : start + ROWS], matrix, kind, target) for start in range(0, len(x), ROWS)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _launch(x: Float[Array, "T inner"], matrix: PackedMatrix, kind: DTypeLike, target: Target) -> Float[Array, "T out"]:
    asked = PackedProduct(len(x), x.shape[1], matrix.shape[0], matrix.format)
    own = division(asked)
    # Several blocks' sums are rounded when they are added up.
    rounded = own.splits == 1 and jnp.dtype(kind) == jnp.bfloat16
    made, grid = kernel(asked._replace(rounded=rounded), own, target)
    result = jax.ShapeDtypeStruct((own.splits, asked.rows, asked.outputs), jnp.bfloat16 if rounded else jnp.float32)
    (parts,) = call(made, grid, [x, matrix.codes, matrix.records], [result])
    return parts[0].astype(kind) if own.splits == 1 else parts.sum(0).astype(kind)

"""Products of up to 128 rows at the speed at which weights are read: see `product.cu`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.llm.kernels.cuda.launch import Kernel

MOST_ROWS = 128
FILES = ("rows.cuh", "silu.cuh", "product.cu")
# Bytes of a block's shared memory on a Hopper GPU, of each of two blocks', and its multiprocessors.
SHARED, TWO, PROCESSORS = 227 << 10, 113 << 10, 132
TILES, CLUSTERS, CHUNK, SQUARES = (192, 128, 96, 64), (1, 2, 4, 8), 64, 64


class Product(NamedTuple):
    """Sizes and options of one matrix product.

    Attributes:
        rows: rows of the input.
        inputs: input features of the matrix.
        outputs: output features of the matrix.
        eps: epsilon of the RMSNorm before it, whose weights x is already multiplied by; None without a norm.
        gated: whether half of the outputs are gates, and the result is their SwiGLU.
        bias: whether a bias is added.
        residual: whether the result is added to the values that it replaces.

    """

    rows: int
    inputs: int
    outputs: int
    eps: float | None = None
    gated: bool = False
    bias: bool = False
    residual: bool = False


class ProductSizes(NamedTuple):
    """Division of a product: outputs per thread block, and thread blocks that share them."""

    tile: int
    cluster: int


def padded(rows: int) -> int:
    """Rows that are added up."""
    return -(-rows // 32) * 32


def slabs(rows: int) -> int:
    """Times 64 rows that the tensor cores take."""
    return -(-rows // 64)


def sizes(product: Product) -> ProductSizes | None:
    """The division that costs a multiprocessor the least, or None if there is none."""
    every = [ProductSizes(tile, cluster) for tile in TILES for cluster in CLUSTERS]
    return min((x for x in every if _fits(product, x)), key=lambda x: _cost(product, x), default=None)


def _fits(product: Product, sizes: ProductSizes) -> bool:
    if product.outputs % sizes.tile or product.inputs % (sizes.cluster * CHUNK) or product.rows > MOST_ROWS:
        return False
    if product.residual and sizes.tile % SQUARES:
        return False
    return _shared(product, sizes) <= SHARED


def _cost(product: Product, sizes: ProductSizes) -> float:
    """In bytes: of rows; of sums from block to block, at 40 % of the pace; of weights, most of them early."""
    blocks, slice_ = product.outputs // sizes.tile * sizes.cluster, product.inputs // sizes.cluster
    # Some parts of the GPU have no place for a fourth neighbour, unless two blocks share a multiprocessor.
    alone = sizes.cluster > 2 and _shared(product, sizes) > TWO
    own = slabs(product.rows) * 64 * slice_ * 2 + 0.3 * sizes.tile * slice_ * 2
    own += 2.5 * padded(product.rows) * sizes.tile * 4 * (1 - 1 / sizes.cluster)
    return -(-blocks // (PROCESSORS - 12 * alone)) * own


def _shared(product: Product, sizes: ProductSizes) -> int:
    chunks = product.inputs // sizes.cluster // CHUNK
    bars = chunks + 1 + (chunks + 1) % 2
    return _after(product, sizes) + 8 * bars + padded(product.rows) * 4


def _after(product: Product, sizes: ProductSizes) -> int:
    """Bytes of the operands; or of sums of this block's inputs, and of the others' for its rows."""
    rows, slice_ = padded(product.rows), product.inputs // sizes.cluster
    sums = (rows + rows // sizes.cluster * (sizes.cluster - 1)) * (sizes.tile + 8) * 4
    return max((sizes.tile + slabs(product.rows) * 64) * slice_ * 2, sums)


def kernel(product: Product, sizes: ProductSizes) -> tuple[Kernel, tuple[int, int, int]]:
    """Return the kernel and its grid.

    Its parameters: x in the order of `rows.cuh`, weight, squares (rows, inputs / 64) where a norm comes before it,
    bias, weights of the norm that comes next; out, and where it is the residual stream also itself times those weights,
    in that order, and its squares. Gated results are in that order, too.
    """
    constants = {
        "ROWS": padded(product.rows),
        "SLABS": slabs(product.rows),
        "COUNT": product.rows,
        "IN": product.inputs,
        "OUT": product.outputs,
        "TILE": sizes.tile,
        "CLUSTER": sizes.cluster,
        "AFTER": _after(product, sizes),
        "NORM": int(product.eps is not None),
        "EPS": product.eps or 0.0,
        "GATED": int(product.gated),
        "BIAS": int(product.bias),
        "RESIDUAL": int(product.residual),
    }
    threads = 256 * slabs(product.rows)
    made = Kernel("product", FILES, tuple(constants.items()), threads, _shared(product, sizes))
    return made, (product.outputs // sizes.tile * sizes.cluster, 1, 1)


def arranged(x: Float[Array, "rows features"]) -> Float[Array, "chunks padded 64"]:
    """Rows in the order of `rows.cuh`, up to a multiple of 64 of them."""
    rows, features = x.shape
    chunks = jnp.pad(x, ((0, slabs(rows) * 64 - rows), (0, 0))).reshape(-1, features // CHUNK, 8, 8)
    return _turned(chunks).swapaxes(0, 1).reshape(features // CHUNK, -1, CHUNK)


def in_order(x: Float[Array, "padded features"], rows: int) -> Float[Array, "rows features"]:
    """The first rows of what is arranged so."""
    padded, features = x.shape
    chunks = x.reshape(features // CHUNK, padded, 8, 8).swapaxes(0, 1)
    return _turned(chunks).reshape(padded, features)[:rows]


def _turned(chunks: Float[Array, "rows chunks 8 8"]) -> Float[Array, "rows chunks 8 8"]:
    """Pieces of a row at piece ^ row % 8, which is its own inverse."""
    at = jnp.arange(8)[None, None, :] ^ (jnp.arange(chunks.shape[0]) % 8)[:, None, None]
    return jnp.take_along_axis(chunks, at[..., None], 2)

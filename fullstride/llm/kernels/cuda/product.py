"""Products of up to 128 rows at the speed at which weights are read: see `product.cu`."""

from typing import NamedTuple

from fullstride.llm.kernels.cuda.launch import Kernel

MOST_ROWS = 128
# Bytes of a block's shared memory on a Hopper GPU, of each of two blocks', and its multiprocessors.
SHARED, TWO, PROCESSORS = 227 << 10, 113 << 10, 132
TILES, CLUSTERS, CHUNK, SQUARES = (192, 128, 64), (1, 2, 4, 8), 64, 64


class Product(NamedTuple):
    """What one does.

    Attributes:
        rows: of the input.
        inputs: of the matrix.
        outputs: of the matrix.
        eps: of the RMSNorm before it, whose weights x has been multiplied by; None where there is none.
        gated: outputs are gates and as many others, and SwiGLU of them is the result.
        bias: is added.
        residual: the result is added to what it replaces.

    """

    rows: int
    inputs: int
    outputs: int
    eps: float | None = None
    gated: bool = False
    bias: bool = False
    residual: bool = False


class Sizes(NamedTuple):
    """How it is divided: outputs of a block, blocks that share them, chunks of weights in shared memory."""

    tile: int
    cluster: int
    stages: int


def padded(rows: int) -> int:
    """Rows that are added up."""
    return -(-rows // 32) * 32


def slabs(rows: int) -> int:
    """Times 64 rows that the tensor cores take."""
    return -(-rows // 64)


def sizes(product: Product) -> Sizes | None:
    """The division that leaves a multiprocessor the fewest bytes to read, or None if there is none."""
    found = [_sizes(product, tile, cluster) for tile in TILES for cluster in CLUSTERS]
    return min((x for x in found if x is not None), key=lambda x: _bytes(product, x), default=None)


def _sizes(product: Product, tile: int, cluster: int) -> Sizes | None:
    slice_ = product.inputs // cluster
    if product.outputs % tile or product.inputs % (cluster * CHUNK) or product.rows > MOST_ROWS:
        return None
    chunks, rows = slice_ // CHUNK, slabs(product.rows) * 64 * slice_ * 2
    # All of a slice at once, or a ring, which the last chunk is at an end of; with room for two blocks, if there can be.
    for limit in (TWO, SHARED):
        held = min(chunks, (limit - rows - _rest(product)) // (tile * CHUNK * 2))
        while held > 1 and (chunks - 1) % held not in (0, held - 1):
            held -= 1
        if held >= min(3, chunks) and _others(product, tile, cluster) <= (held - 1) * tile * CHUNK * 2:
            return Sizes(tile, cluster, held)
    return None


def _rest(product: Product) -> int:
    """A barrier, and what rows are divided by."""
    return 16 + padded(product.rows) * 4


def _others(product: Product, tile: int, cluster: int) -> int:
    """Bytes of the other blocks' sums for a block's rows."""
    return padded(product.rows) // cluster * (cluster - 1) * (tile + 8) * 4


def _bytes(product: Product, sizes: Sizes) -> int:
    blocks = product.outputs // sizes.tile * sizes.cluster
    return -(-blocks // PROCESSORS) * product.inputs // sizes.cluster * (sizes.tile + slabs(product.rows) * 64)


def kernel(product: Product, sizes: Sizes) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and its grid.

    Its parameters: x, weight, squares (rows, inputs / 64) where a norm comes before it, bias, weights of the norm that comes
    next; out, and where it is the residual stream also itself times those weights, and its squares.
    """
    slice_ = product.inputs // sizes.cluster
    shared = sizes.stages * sizes.tile * CHUNK * 2 + slabs(product.rows) * 64 * slice_ * 2 + _rest(product)
    constants = {
        "ROWS": padded(product.rows),
        "COUNT": product.rows,
        "IN": product.inputs,
        "OUT": product.outputs,
        "TILE": sizes.tile,
        "CLUSTER": sizes.cluster,
        "STAGES": sizes.stages,
        "NORM": int(product.eps is not None),
        "EPS": product.eps or 0.0,
        "GATED": int(product.gated),
        "BIAS": int(product.bias),
        "RESIDUAL": int(product.residual),
    }
    made = Kernel("product", ("product.cu",), tuple(constants.items()), 256 * slabs(product.rows), shared)
    return made, (product.outputs // sizes.tile * sizes.cluster, 1, 1)

"""Products of up to 128 rows at the speed at which weights are read: see `product.cu`."""

from typing import NamedTuple

from fullstride.llm.kernels.cuda.launch import Kernel

MOST_ROWS = 128
# Bytes of a block's shared memory on a Hopper GPU, and its multiprocessors.
SHARED, PROCESSORS = 227 << 10, 132
TILES, CLUSTERS, CHUNK = (192, 128, 64), (1, 2, 4, 8), 64


class Product(NamedTuple):
    """What one does.

    Attributes:
        rows: of the input.
        inputs: of the matrix.
        outputs: of the matrix.
        eps: of the RMSNorm before it; None where there is none.
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
    """How it is divided: outputs of a block, blocks that share them, chunks in shared memory, groups of four warps."""

    tile: int
    cluster: int
    stages: int
    groups: int


def padded(rows: int) -> int:
    """Rows as the tensor cores take them."""
    return -(-rows // 32) * 32


def sizes(product: Product) -> Sizes | None:
    """The division that leaves a multiprocessor the fewest bytes to read, or None if there is none."""
    found = [_sizes(product, tile, cluster) for tile in TILES for cluster in CLUSTERS]
    return min((x for x in found if x is not None), key=lambda x: _bytes(product, x), default=None)


def _sizes(product: Product, tile: int, cluster: int) -> Sizes | None:
    rows, slice_ = padded(product.rows), product.inputs // cluster
    if product.outputs % tile or product.inputs % (cluster * CHUNK) or rows > MOST_ROWS:
        return None
    chunks, room = slice_ // CHUNK, SHARED - rows * slice_ * 2 - _rest(product, cluster)
    held = min(chunks, room // (tile * CHUNK * 2))
    # All of a slice at once, or a ring.
    stages = chunks + 1 if held == chunks else held
    columns = tile // 64
    groups = columns * min(chunks, max(1, (4 if rows > 64 else 2) // columns))
    made = Sizes(tile, cluster, stages, groups)
    return made if stages >= 3 and _parts(product, made) + _rest(product, cluster) <= SHARED else None


def _rest(product: Product, cluster: int) -> int:
    """Sums of squares, and the norm's weights."""
    return padded(product.rows) * 4 + product.inputs // cluster * 2


def _parts(product: Product, sizes: Sizes) -> int:
    return padded(product.rows) * (sizes.tile + 4) * 4 * (sizes.groups * 64 // sizes.tile)


def _bytes(product: Product, sizes: Sizes) -> int:
    blocks = product.outputs // sizes.tile * sizes.cluster
    return -(-blocks // PROCESSORS) * product.inputs // sizes.cluster * (sizes.tile + padded(product.rows))


def kernel(product: Product, sizes: Sizes) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and its grid; its parameters: x, weight, the norm's weights, bias, out."""
    rows, slice_ = padded(product.rows), product.inputs // sizes.cluster
    held = min(sizes.stages, slice_ // CHUNK)
    operands = held * sizes.tile * CHUNK * 2 + rows * slice_ * 2
    after = -(-max(operands, _parts(product, sizes)) // 16) * 16
    constants = {
        "ROWS": rows,
        "COUNT": product.rows,
        "IN": product.inputs,
        "OUT": product.outputs,
        "TILE": sizes.tile,
        "CLUSTER": sizes.cluster,
        "STAGES": sizes.stages,
        "GROUPS": sizes.groups,
        "AFTER": after,
        "NORM": int(product.eps is not None),
        "EPS": product.eps or 0.0,
        "GATED": int(product.gated),
        "BIAS": int(product.bias),
        "RESIDUAL": int(product.residual),
    }
    shared = after + _rest(product, sizes.cluster)
    made = Kernel("product", ("product.cu",), tuple(constants.items()), 128 * sizes.groups, shared)
    return made, (product.outputs // sizes.tile * sizes.cluster, 1, 1)

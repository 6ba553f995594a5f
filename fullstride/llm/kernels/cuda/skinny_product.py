"""Products of few rows at the speed at which weights are read: see `skinny_product.cu`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.llm.kernels.cuda.launch import Kernel, call
from fullstride.llm.kernels.cuda.target import HOPPER, Target
from fullstride.llm.kernels.xla import kernels as xla
from fullstride.llm.packed.matrix import Weight

MOST_ROWS, WARPS, CHUNK = 16, 8, 32
# Outputs of a block, and blocks that keep a GPU busy: the most outputs that leave so many, for which x is read least.
OUTS, BUSY = (32, 16, 8), 192
# Bytes of a warp's piece, and of the rings of a block: every GPU has so much shared memory.
PIECE, RINGS = 512, 96 << 10
MOST_STAGES = 8


class SkinnyProduct(NamedTuple):
    """Sizes and options of a product.

    Attributes:
        rows: rows of the input.
        inputs: input features of the matrix.
        outputs: output features of the matrix.
        eps: epsilon of the RMSNorm before it; None without a norm.
        bias: whether a bias is added.
        residual: whether a residual is added.
        exact: whether the result is fp32.

    """

    rows: int
    inputs: int
    outputs: int
    eps: float | None = None
    bias: bool = False
    residual: bool = False
    exact: bool = False


def fits(x: Float[Array, "T wide"], weight: Float[Array, "out inner"]) -> bool:
    """Return whether the kernel computes a product: of few rows, in bf16, with an array."""
    if {str(x.dtype), str(weight.dtype)} != {"bfloat16"}:
        return False
    outputs, inputs = weight.shape
    return 0 < len(x) <= MOST_ROWS and inputs % CHUNK == 0 and outputs % 2 == 0


def kernel(product: SkinnyProduct, target: Target, outs: int | None = None) -> tuple[Kernel, tuple[int, int, int]]:
    """Return the kernel and its grid.

    Its parameters: x, weight, weights of the norm, bias, residual; out.

    Args:
        product: of a size that fits.
        target: GPU that it is compiled for.
        outs: outputs of a block; None for the usual number.

    """
    outs = outs or next((n for n in OUTS if -(-product.outputs // n) >= BUSY), OUTS[-1])
    pieces = outs // 8 + -(-product.rows // 8) + (product.eps is not None)
    # A ring that holds all of a warp's chunks has one stage more than them.
    chunks = -(-product.inputs // CHUNK // WARPS)
    stages = max(2, min(MOST_STAGES, RINGS // (WARPS * pieces * PIECE), chunks + 1))
    constants = {
        "ROWS": product.rows,
        "IN": product.inputs,
        "OUT": product.outputs,
        "OUTS": outs,
        "WARPS": WARPS,
        "STAGES": stages,
        "NORM": int(product.eps is not None),
        "EPS": product.eps or 0.0,
        "BIAS": int(product.bias),
        "RESIDUAL": int(product.residual),
        "EXACT": int(product.exact),
    }
    shared = WARPS * stages * pieces * PIECE
    made = Kernel("skinny_product", ("skinny_product.cu",), tuple(constants.items()), 32 * WARPS, shared, target)
    return made, (-(-product.outputs // outs), 1, 1)


def project(
    x: Float[Array, "T wide"],
    weight: Weight,
    *,
    norm: tuple[Float[Array, " inner"], float] | None = None,
    gated: bool = False,
    bias: Float[Array, " out"] | None = None,
    residual: Float[Array, "T out"] | None = None,
    exact: bool = False,
    target: Target = HOPPER,
    others: Callable[..., Array] = xla.project,
) -> Float[Array, "T out"]:
    """See `Project`: of few rows by the kernel, otherwise by `others`."""
    if not isinstance(weight, jax.Array) or not fits(x, weight):
        return others(x, weight, norm=norm, gated=gated, bias=bias, residual=residual, exact=exact)
    if gated:
        gate, up = jnp.split(x, 2, axis=-1)
        x = jax.nn.silu(gate) * up
    scale, eps = norm or (None, None)
    rows, (outputs, inputs) = len(x), weight.shape
    product = SkinnyProduct(rows, inputs, outputs, eps, bias is not None, residual is not None, exact)
    # What a product does without is not looked at.
    operands = [jnp.zeros(0, x.dtype) if each is None else each for each in (scale, bias, residual)]
    dtype = jnp.float32 if exact else x.dtype
    (out,) = call(*kernel(product, target), (x, weight, *operands), (jax.ShapeDtypeStruct((rows, outputs), dtype),))
    return out

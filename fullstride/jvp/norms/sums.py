"""Several sums for the barriers of one, and their substitutes in the interpreter."""

from typing import no_type_check

import triton
import triton.language as tl
from triton import knobs

# The interpreter runs reductions of several values in slow Python, and does not support inline assembly.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
@no_type_check
def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
@no_type_check
def _add_3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
@no_type_check
def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
@no_type_check
def _add_5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
@no_type_check
def sums(values, AXIS: tl.constexpr):
    """Sum up to five tiles of one shape along an axis or, if that is None, over all their elements."""
    COUNT: tl.constexpr = len(values)
    if INTERPRETED or COUNT == 1:
        result = ()
        for i in tl.static_range(COUNT):
            result += (tl.sum(values[i], axis=AXIS),)
    elif COUNT == 2:
        result = tl.reduce(values, AXIS, _add_2)
    elif COUNT == 3:
        result = tl.reduce(values, AXIS, _add_3)
    elif COUNT == 4:
        result = tl.reduce(values, AXIS, _add_4)
    else:
        result = tl.reduce(values, AXIS, _add_5)
    return result


@triton.jit
@no_type_check
def sigmoid(u):
    """1 / (1 + exp(-u)), by the hardware's exponential and reciprocal as they are (each to 2^-22)."""
    if INTERPRETED:
        s = tl.sigmoid(u)
    else:
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return s

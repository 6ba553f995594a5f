"""The derivative of attention alone, beside a forward of the library's that left o and lse."""

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from fullstride.jvp.attention.forward_table import Config
from fullstride.jvp.attention.launching import (
    as_pointer,
    band,
    chosen,
    describe,
    on_device,
    options,
    strides_of,
)
from fullstride.jvp.attention.layout import output_like
from fullstride.jvp.attention.tangent_kernel import tangent

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Rows = Float[Tensor, "b h lq"]
Mask = Bool[Tensor, "b h lq lk"] | Float[Tensor, "b h lq lk"]


def tangent_from_lse(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    o: Outputs,
    lse: Rows,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    precision: str = "ieee",
    config: Config | None = None,
) -> tuple[Outputs, Rows]:
    """The derivative that `forward` returns, from its primal's outputs; at least one tangent is given.

    Args:
        q: queries, of any strides; head h of H uses key head h // (H / Hk).
        k: keys.
        v: values.
        tq: tangent of q, or None.
        tk: tangent of k, or None.
        tv: tangent of v, or None.
        o: the primal's output.
        lse: logsumexp of the primal's scores, contiguous, natural logarithm, fp32; -inf where a row sees no key.
        scale: of the scores.
        mask: true where a query sees a key, or what is added to the scores (-inf hides); expanded to full size.
        causal: key j is seen by query i if j <= i.
        window: (left, right): key j is seen by query i if i - left <= j <= i + right; negative is without limit.
        precision: of fp32 products: "ieee", "tf32x3" or "tf32".
        config: tile sizes; None takes the table's.

    Returns:
        to and mu, the mean of the scores' tangent in fp32.

    """
    inputs = (q, k, v, tq, tk, tv)
    config, tma = chosen(inputs, mask is not None, precision, config)
    to, mu = output_like(q, v.shape[3]), torch.empty_like(lse)
    blocks = triton.cdiv(q.shape[2], config.block_m)
    grid = (q.shape[0] * q.shape[1] * blocks,)
    if grid[0] == 0:
        return to, mu
    left, right, has_left, has_right = band(causal, window, k.shape[2] + q.shape[2])
    strides = [strides_of(x) for x in (*inputs, mask, o, to)]
    arguments = [
        *(describe(inputs, config) if tma else inputs),
        *(as_pointer(mask), o, to, lse, mu, *strides, scale, left, right),
        *(q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], blocks),
    ]
    constants = options(q, v, strides, config, tma, precision)
    # Scores may be compared with nothing: a negative scale needs no care here.
    constants |= {"ALL_EDGE": mask is not None, "LEFT": has_left, "RIGHT": has_right}
    with on_device(q):
        tangent[grid](*arguments, **constants)
    return to, mu

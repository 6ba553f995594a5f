"""`partial_jvp`: a pass over a batch, with the derivative of its first samples."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import fullstride.jvp.mixed_more_rules
import fullstride.jvp.mixed_rules  # noqa: F401  both register them
from fullstride.jvp.dual import check_pair
from fullstride.jvp.mixed_batch import REMEDY, MixedBatch


def partial_jvp(
    fn: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """Compute fn(*primals) of B samples, and the derivative of the first n, in one pass over the batch.

    The primals run as without a derivative, each operation once over all samples, and save the same tensors for a
    backward pass; the tangents run alongside, without a graph. fn acts on each sample alone, and is made of this
    package's operations and of those of torch's that have a rule here (`fullstride.jvp.mixed_rules`); an
    `autograd.Function` has none.

    Args:
        fn: a function of tensors whose first dimension is that of the samples, such as a module, to one of them.
        primals: arguments of fn, of B samples each.
        tangents: for each primal the tangent of its first n samples, with the same n for all; None for a constant.

    Returns:
        The output (B, ...), and its tangent (n, ...), detached.

    Raises:
        ValueError: if the tangents do not fit the primals, or if fn calls a function without a rule, an
            `autograd.Function` among them, or stops autograd.
        AttributeError: if fn calls a method without one.

    """
    counts = {len(tangent) for tangent in tangents if tangent is not None}
    if len(counts) != 1:
        raise ValueError(f"tangents have {sorted(counts)} samples, expected at least one tangent and one size for all")
    n = counts.pop()
    pairs = list(zip(primals, tangents, strict=True))
    for primal, tangent in pairs:
        check_pair(primal[:n], tangent)
    out = fn(
        *(primal if tangent is None else MixedBatch(primal, tangent.detach().clone()) for primal, tangent in pairs)
    )
    if not isinstance(out, MixedBatch):
        raise ValueError(f"fn returned a {type(out).__name__}, expected a batch with its tangent; {REMEDY}")
    out.check_front()
    return out.primal, out.tangent

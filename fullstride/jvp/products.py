"""Products with constant weights, whose tangents are one product each."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from fullstride.jvp.dual import pack, unpack, unpack_all
from fullstride.jvp.mixed_batch import Batch, MixedBatch
from fullstride.jvp.state import computes_apart, tangent_grad, without_own_modes


def linear(x: Batch, weight: Tensor, bias: Tensor | None) -> Batch:
    """`F.linear` whose tangent is one product."""
    if isinstance(x, MixedBatch):
        return F.linear(x, weight, bias)
    with without_own_modes():
        (primal, tangent), *parameters = unpack_all(x, weight, bias)
        if tangent is None or not are_constant(parameters):
            zeros = None
        elif computes_apart():
            return pack(_of_rows(primal, weight, bias), along(lambda t: _of_rows(t, weight), tangent))
        else:
            zeros = None if bias is None else torch.zeros_like(bias)
    return F.linear(x, weight, bias if bias is None else pack(bias, zeros))


def _of_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of all rows at once, as PyTorch does it for a weight that needs a gradient.

    While a compiler traces `torch.func`, which hides that need, it would multiply each sample on its own instead.
    """
    if x.ndim < 3 or not torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    rows = x.shape[:-1]
    return F.linear(x.reshape(rows.numel(), x.shape[-1]), weight, bias).view(*rows, weight.shape[0])


def broadcast(a: Any, b: Any) -> bool:
    """Return whether a and b are tensors of unlike shapes that may both have a tangent."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape == b.shape:
        return False
    return a.is_floating_point() and b.is_floating_point() and computes_apart() and not _vmapped()


def _vmapped() -> bool:
    """Return whether a vmap is inside the derivative, in which duals cannot be unpacked."""
    return TransformType.Vmap in [level.key() for level in get_interpreter_stack() or []]


# As `torch.compiler.assume_constant_result` marks it, which imports the compiler: it is called while one traces.
_vmapped._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` whose tangent lies in memory as the product does.

    PyTorch's own may lie otherwise if one of them is broadcast, and what copies it fails while a compiler traces with
    symbolic sizes.
    """
    (a, ta), (b, tb) = unpack_all(a, b)
    if ta is None or tb is None:
        return pack(a, ta) * pack(b, tb)
    return pack(a * b, ta * b + a * tb)


def linear_map(f: Callable[[Tensor], Tensor], x: Batch) -> Batch:
    """f(x) of an f that is linear in x, such as a filter: f of the primal and f of the tangent, each once.

    Torch's own derivative of a convolution or a product also computes that of a constant weight, a third of the work.
    """
    if isinstance(x, MixedBatch):
        return x.along(f)
    with without_own_modes():
        primal, tangent = unpack(x)
        if tangent is not None and computes_apart():
            return pack(f(primal), along(f, tangent))
    return f(x)


def along(f: Callable[[Tensor], Tensor], tangent: Tensor) -> Tensor:
    """Compute f(tangent), recorded by autograd only if gradients through tangents may be needed."""
    if tangent_grad():
        return f(tangent)
    with torch.no_grad():
        return f(tangent)


def are_constant(pairs: Iterable[tuple[Any, Tensor | None]]) -> bool:
    """Return whether no parameter, given with its tangent, has one."""
    return all(tangent is None for _, tangent in pairs)

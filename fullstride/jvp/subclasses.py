"""Tensor subclasses and layouts among an op's arguments, whose memory need not hold their values."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor, FunctionalTensor})


def materialized(name: str, x: Tensor) -> Tensor:
    """Return a tensor whose memory holds the values of x, for kernels that read memory; x itself if it does.

    Gradients flow back to x.

    Args:
        name: name of the argument, for the message.
        x: a tensor, of a subclass or not.

    Raises:
        ValueError: for a sparse tensor, and for a subclass that cannot be turned into a plain tensor here.

    """
    kind = type(x)
    if x.layout not in (torch.strided, torch.jagged):
        raise ValueError(f"{name} is a {x.layout} tensor, expected a dense one: convert it first, by x.to_dense()")
    if kind in PLAIN:
        return x
    if isinstance(x, CausalBias):
        triangle = torch.ones(x.seq_len_q, x.seq_len_kv, dtype=torch.bool, device=x.device)
        return triangle.tril(x.seq_len_kv - x.seq_len_q if x.variant == CausalVariant.LOWER_RIGHT else 0)
    if _only_a_name(kind):
        return x.as_subclass(Tensor)
    if kind.dequantize is not Tensor.dequantize:
        return x.dequantize()
    raise ValueError(
        f"{name} is a {kind.__name__}, expected a torch.Tensor: a kernel reads memory, which need not hold a "
        "subclass's values; convert it first (DTensor.to_local(), NestedTensor.values() with attention_varlen, "
        "MaskedTensor.to_tensor(), x.as_subclass(torch.Tensor) if its memory does hold it)"
    )


def _only_a_name(kind: Any) -> bool:
    """Return whether a subclass leaves every operation to `Tensor`."""
    function: Any = kind.__torch_function__
    unchanged = function is torch._C._disabled_torch_function_impl or (
        getattr(function, "__func__", None) is Tensor.__torch_function__.__func__  # pyright: ignore[reportFunctionMemberAccess]
    )
    return unchanged and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def materialized_all(**tensors: Any) -> tuple[Any, ...]:
    """Return the arguments of these names by `materialized`; an absent one stays absent."""
    return tuple(None if x is None else materialized(name, x) for name, x in tensors.items())

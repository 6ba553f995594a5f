"""The library's backward pass of attention, for gradients that do not go through the tangent.

It needs no more than (q, k, v, o, lse), which the dual forward pass leaves too.
"""

from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.attention.launching import capability, fits_tma

# Keys from which the library is faster than the kernels of this package, by architecture of Hopper and of others.
CUDNN_FROM, FLASH_FROM = 512, 1024


def backward_of(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv from cuDNN or the flash kernels, as shapes, GPU and torch's switches allow; None where neither does.

    Neither gives the same bits twice, so deterministic mode goes without them. `torch.backends.cuda.enable_cudnn_sdp`
    and `enable_flash_sdp` switch each off, as they do for `scaled_dot_product_attention`.
    """
    if q.itemsize != 2 or scale <= 0 or torch.are_deterministic_algorithms_enabled():
        return None
    if not all(map(fits_tma, (q, k, v, o))) or q.shape[-1] % 8 or v.shape[-1] % 8:
        return None
    run = _choose(q, k, v, causal)
    return None if run is None else run(go if fits_tma(go) else go.contiguous(), q, k, v, o, lse, causal, scale)


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    lengths = q.shape[2], k.shape[2]
    if capability(q)[0] >= 9 and torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available():
        return _cudnn if lengths[1] >= CUDNN_FROM else None
    square = q.shape[-1] == v.shape[-1] and (not causal or lengths[0] == lengths[1])
    if torch.backends.cuda.flash_sdp_enabled() and square and lengths[1] >= FLASH_FROM:
        return _flash
    return None


def _no_dropout(x: Tensor) -> Tensor:
    """A seed, or an offset, that is not read."""
    return torch.empty((), dtype=torch.int64, device=x.device)


def _cudnn(go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    seeds: tuple[Any, ...] = (_no_dropout(q), _no_dropout(q))
    longest = None, None, q.shape[2], k.shape[2]
    op: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return op(go, q, k, v, o, lse.unsqueeze(-1), *seeds, None, *longest, 0.0, causal, scale=scale)


def _flash(go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    longest = None, None, q.shape[2], k.shape[2]
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return op(go, q, k, v, o, lse, *longest, 0.0, causal, _no_dropout(q), _no_dropout(q), scale=scale)

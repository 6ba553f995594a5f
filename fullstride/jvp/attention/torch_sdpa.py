"""The library's backward pass of attention, for gradients that do not go through the tangent.

It needs no more than (q, k, v, o, lse), which the dual forward pass leaves too.
"""

from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.attention.cudnn import whole_tiles
from fullstride.jvp.attention.launch_common import capability, fits_tma

# Keys from which cuDNN is faster than the kernels of this package; with fewer they are even. The flash kernels that
# PyTorch brings are slower on Hopper at every length.
CUDNN_FROM = 512


def backward_of(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv from cuDNN from Hopper on, else from the flash kernels; None where neither is to be taken.

    Neither gives the same bits twice, so deterministic mode goes without them. `torch.backends.cuda.enable_cudnn_sdp`
    and `enable_flash_sdp` switch them off, as they do for `scaled_dot_product_attention`.
    """
    if q.itemsize != 2 or scale <= 0 or torch.are_deterministic_algorithms_enabled():
        return None
    if not all(map(fits_tma, (q, k, v, o))) or q.shape[-1] % 8 or v.shape[-1] % 8:
        return None
    run = _choose(q, k, v, causal)
    return None if run is None else run(go if fits_tma(go) else go.contiguous(), q, k, v, o, lse, causal, scale)


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    queries, keys = q.shape[2], k.shape[2]
    if capability(q)[0] >= 9:
        exact = keys >= CUDNN_FROM and whole_tiles(queries, keys)
        return _cudnn if torch.backends.cuda.cudnn_sdp_enabled() and exact else None
    square = q.shape[-1] == v.shape[-1] and (not causal or queries == keys)
    return _flash if torch.backends.cuda.flash_sdp_enabled() and square and min(queries, keys) > 0 else None


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

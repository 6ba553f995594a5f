"""PyTorch's own attention: when its backward passes are used, and when cuDNN's would be wrong.

A gradient that does not go through the tangent needs no more than (q, k, v, o, lse), which the dual forward pass leaves
too.

On Hopper cuDNN reads keys in tiles of 128 and hides what lies beyond the last one by tiles of 64: with 64 keys in the
last tile it takes exp(0 - lse) of the other 64, which is infinite if a row's scores are all below -88, and the
gradient of q is NaN there, in cuDNN up to 9.30 (github.com/NVIDIA/cudnn-frontend/pull/628; seen with masks in
github.com/pytorch/pytorch/issues/196678). Other lengths have had the like (cudnn-frontend/issues/160 and 1072).
"""

from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.attention.arguments import WIDEST
from fullstride.jvp.dual import may_require_grad

TILE = 128
# Keys from which cuDNN is faster than the kernels of this package; with fewer keys both are equally fast. The flash
# kernels of PyTorch are slower on Hopper at every length.
CUDNN_FROM = 512


def whole_tiles(queries: int, keys: int) -> bool:
    """Return whether the lengths leave no tile half empty, so that nothing needs hiding."""
    return queries % TILE == 0 and keys % TILE == 0


def may_lose_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Return whether a gradient is needed for which `scaled_dot_product_attention` may take cuDNN in half-empty tiles.

    With a mask that requires a gradient, or shapes that no fused kernel supports, it does not take cuDNN.
    """
    wanted = torch.is_grad_enabled() and may_require_grad(q, k, v)
    if not wanted or not q.is_cuda or q.itemsize != 2 or (mask is not None and mask.requires_grad):
        return False
    fused = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    fused = fused and max(q.shape[-1], v.shape[-1]) <= WIDEST
    return fused and not whole_tiles(q.shape[2], k.shape[2]) and _sdpa_takes_cudnn()


@torch.compiler.assume_constant_result
def _sdpa_takes_cudnn() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability() >= (9, 0)


def backward_of(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv from cuDNN from Hopper on, else from the flash kernels; None if neither may be used.

    Neither gives the same bits twice, so deterministic mode goes without them. `torch.backends.cuda.enable_cudnn_sdp`
    and `enable_flash_sdp` switch them off, as they do for `scaled_dot_product_attention`.
    """
    from fullstride.jvp.attention.launch_common import capability, fits_tma  # only GPUs have Triton

    if q.itemsize != 2 or scale <= 0 or torch.are_deterministic_algorithms_enabled():
        return None
    if not all(map(fits_tma, (q, k, v, o))) or q.shape[-1] % 8 or v.shape[-1] % 8:
        return None
    run = _choose(q, k, v, causal, hopper=capability(q)[0] >= 9)
    return None if run is None else run(go if fits_tma(go) else go.contiguous(), q, k, v, o, lse, causal, scale)


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool, hopper: bool) -> Any:
    queries, keys = q.shape[2], k.shape[2]
    if hopper:
        exact = keys >= CUDNN_FROM and whole_tiles(queries, keys)
        return _cudnn if torch.backends.cuda.cudnn_sdp_enabled() and exact else None
    square = q.shape[-1] == v.shape[-1] and (not causal or queries == keys)
    return _flash if torch.backends.cuda.flash_sdp_enabled() and square and min(queries, keys) > 0 else None


def _no_dropout(x: Tensor) -> Tensor:
    """Return a seed or offset that is never read."""
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

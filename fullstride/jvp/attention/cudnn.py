"""Where cuDNN's backward pass of attention is wrong.

On Hopper it reads keys in tiles of 128 and hides what lies beyond the last one by tiles of 64: with 64 keys in the last
tile it takes exp(0 - lse) of the other 64, which is infinite where a row's scores are all below -88, and the gradient
of q is NaN there, in cuDNN up to 9.30 (github.com/NVIDIA/cudnn-frontend/pull/628; seen with masks in
github.com/pytorch/pytorch/issues/196678). Other lengths have had the like (cudnn-frontend/issues/160 and 1072).
"""

import torch
from torch import Tensor

from fullstride.jvp.attention.arguments import WIDEST
from fullstride.jvp.dual import may_require_grad

TILE = 128


def whole_tiles(queries: int, keys: int) -> bool:
    """Whether such lengths leave no tile half empty, so that nothing is to be hidden."""
    return queries % TILE == 0 and keys % TILE == 0


def may_lose_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a gradient is wanted for which `scaled_dot_product_attention` may take cuDNN in half-empty tiles.

    Of a mask that learns, and of shapes that no fused kernel takes, it takes something else.
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

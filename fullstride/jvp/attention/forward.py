"""Launches the fused forward of attention and its derivative: dense or packed, with masks, causal and windows."""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fullstride.jvp.attention.forward_kernel import dual_forward
from fullstride.jvp.attention.forward_table import Config, pick
from fullstride.jvp.attention.layout import output_like, visible_band
from fullstride.jvp.attention.tiles import pieces

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Rows = Float[Tensor, "b h lq"]
Mask = Bool[Tensor, "b h lq lk"] | Float[Tensor, "b h lq lk"]
PackedRows = Float[Tensor, "h tq"]

# A tile's offsets are taken in 32 bits where its 256 rows and columns cannot pass them.
WIDE_STRIDE = 2**31 // 256


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    precision: str = "ieee",
    config: Config | None = None,
) -> tuple[Outputs, Outputs | None, Rows, Rows | None]:
    """Attention and its derivative along the tangents; an absent tangent is zero, and its work is not done.

    Args:
        q: queries, of any strides; head h of H uses key head h // (H / Hk).
        k: keys.
        v: values.
        tq: tangent of q, or None.
        tk: tangent of k, or None.
        tv: tangent of v, or None.
        scale: of the scores.
        mask: true where a query sees a key, or what is added to the scores (-inf hides); expanded to full size.
        causal: key j is seen by query i if j <= i.
        window: (left, right): key j is seen by query i if i - left <= j <= i + right; negative is without limit.
        precision: of fp32 products: "ieee", "tf32x3" or "tf32".
        config: tile sizes; None takes the table's.

    Returns:
        o, to, lse, mu: o and to in q's dtype, lse = logsumexp of the scores and mu = the mean of their tangent in fp32.
        to and mu are None without any tangent. A row that sees no key has o = to = mu = 0 and lse = -inf.

    """
    tangents = tq is not None or tk is not None or tv is not None
    o = output_like(q, v.shape[3])
    to = output_like(q, v.shape[3]) if tangents else None
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    mu = torch.empty_like(lse) if tangents else None
    config = config or pick(q.dtype, q.shape[3], v.shape[3], capability(q))
    sizes = (q.shape[0] * q.shape[1], q.shape[1], q.shape[1] // max(1, k.shape[1]), q.shape[2], k.shape[2], q.shape[2])
    launch((q, k, v, tq, tk, tv), mask, (o, to, lse, mu), None, sizes, scale, causal, window, precision, config)
    return o, to, lse, mu


def forward_varlen(
    q: Float[Tensor, "tq h d"],
    k: Float[Tensor, "tk hk d"],
    v: Float[Tensor, "tk hk dv"],
    tq: Float[Tensor, "tq h d"] | None,
    tk: Float[Tensor, "tk hk d"] | None,
    tv: Float[Tensor, "tk hk dv"] | None,
    cu_seqlens_q: Int32[Tensor, " n"],
    cu_seqlens_k: Int32[Tensor, " n"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    precision: str = "ieee",
    config: Config | None = None,
) -> tuple[Float[Tensor, "tq h dv"], Float[Tensor, "tq h dv"] | None, PackedRows, PackedRows | None]:
    """`forward` for sequences packed one after the other.

    Args:
        q: queries of all sequences, of any strides.
        k: keys.
        v: values.
        tq: tangent of q, or None.
        tk: tangent of k, or None.
        tv: tangent of v, or None.
        cu_seqlens_q: where each sequence's queries start, and their number at the end; a sequence may be empty.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: queries of the longest sequence; more is harmless, less leaves rows unwritten.
        max_seqlen_k: keys of the longest sequence.
        scale: of the scores.
        causal: key j of a sequence is seen by its query i if j <= i.
        window: as in `forward`, within a sequence.
        precision: of fp32 products: "ieee", "tf32x3" or "tf32".
        config: tile sizes; None takes the table's.

    Returns:
        o, to, lse, mu: as `forward`, packed.

    """
    total, heads, d = q.shape
    tangents = tq is not None or tk is not None or tv is not None
    o = q.new_empty(total, heads, v.shape[2])
    to = torch.empty_like(o) if tangents else None
    lse = q.new_empty(heads, total, dtype=torch.float32)
    mu = torch.empty_like(lse) if tangents else None
    config = config or pick(q.dtype, d, v.shape[2], capability(q))
    sequences = cu_seqlens_q.shape[0] - 1
    sizes = (sequences * heads, heads, heads // max(1, k.shape[1]), total, max_seqlen_k, max_seqlen_q)
    packed = (cu_seqlens_q, cu_seqlens_k)
    launch((q, k, v, tq, tk, tv), None, (o, to, lse, mu), packed, sizes, scale, causal, window, precision, config)
    return o, to, lse, mu


def capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of the tensor's GPU; Hopper's for the interpreter on a CPU."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def launch(inputs, mask, outputs, packed, sizes, scale, causal, window, precision, config) -> None:
    """Run the kernel on a grid of blocks of queries, `sizes`: heads in all, heads, group, len_q, len_k, longest."""
    total, heads, group, len_q, len_k, longest = sizes
    blocks = triton.cdiv(longest, config.block_m)
    if total * blocks == 0:
        return
    q, _, v, *_ = inputs
    left, right = visible_band(causal, window)
    qk, values = pieces(q.shape[-1]), pieces(v.shape[-1])
    tma = config.tma and packed is None and not qk[2] and not values[2] and all(map(fits_tma, inputs))
    strides = [strides_of(x) for x in (*inputs, mask, *outputs[:2])]
    if tma:
        inputs = describe(inputs, qk[1], values[1], config)
    with on_device(q):
        dual_forward[(total * blocks,)](
            *inputs,
            mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
            *outputs,
            *(packed or (None, None)),
            *strides,
            scale,
            min(max(left, 0), len_k + longest),
            min(max(right, 0), len_k + longest),
            heads,
            group,
            len_q,
            len_k,
            blocks,
            QK=qk,
            V=values,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            EARLY=config.early,
            TMA=tma,
            ALL_EDGE=mask is not None or scale < 0,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            PRECISION=precision,
            INDEX=tl.int64 if max(s for stride in strides if stride for s in stride) >= WIDE_STRIDE else tl.int32,
            num_warps=config.warps,
            num_stages=config.stages,
        )


def strides_of(x: Tensor | None) -> tuple[int, int, int, int] | None:
    """Strides of (batch, head, row, column); packed rows have no batch."""
    if x is None:
        return None
    if x.dim() == 3:
        return 0, x.stride(1), x.stride(0), x.stride(2)
    return x.stride(0), x.stride(1), x.stride(2), x.stride(3)


def fits_tma(x: Tensor | None) -> bool:
    """Whether the tensor memory accelerator can copy a tensor's rows: 16-byte strides, nothing broadcast or empty."""
    if x is None:
        return True
    aligned = all(size == 1 or (s > 0 and s * x.itemsize % 16 == 0) for size, s in zip(x.shape[:3], x.stride()[:3]))
    return aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0 and x.numel() > 0


def describe(inputs: Any, d: int, dv: int, config: Config) -> list[TensorDescriptor | None]:
    """Descriptors of the inputs' tiles; q, k, v and their tangents in this order."""
    found = []
    for x, rows, columns in zip(inputs, (config.block_m, config.block_n, config.block_n) * 2, (d, d, dv) * 2):
        strides = None if x is None else [s if n > 1 else 16 for n, s in zip(x.shape[:3], x.stride())]
        found.append(None if x is None else TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns]))
    return found


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """The tensor's GPU as the current one, where kernels are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

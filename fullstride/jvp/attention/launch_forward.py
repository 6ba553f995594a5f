"""Launches of the fused forward of attention and its derivative: dense or packed, with masks, causal and windows."""

from typing import Any

import torch
import triton
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fullstride.device import triton_compile
from fullstride.jvp.attention.forward_kernel import dual_forward
from fullstride.jvp.attention.forward_table import ForwardConfig, SpecialisedConfig, pick_specialised
from fullstride.jvp.attention.launch_common import (
    as_pointer,
    band,
    chosen,
    describe,
    on_device,
    strides_of,
    takes_specialised,
    tiling,
)
from fullstride.jvp.attention.layout import output_like

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Rows = Float[Tensor, "b h lq"]
Mask = Bool[Tensor, "b h lq lk"] | Float[Tensor, "b h lq lk"]
PackedRows = Float[Tensor, "h tq"]


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
    config: ForwardConfig | SpecialisedConfig | None = None,
) -> tuple[Outputs, Outputs | None, Rows, Rows | None]:
    """Attention and its derivative along the tangents: see `naive.forward`, but that lse and mu are fp32.

    Tensors may have any strides. `config` replaces the table's tile sizes, and the choice of the kernel for the shape.

    Raises:
        ValueError: if the configuration is of the warp-specialised kernel, which does not take these inputs.

    """
    tangents = tq is not None or tk is not None or tv is not None
    o = output_like(q, v.shape[3])
    to = output_like(q, v.shape[3]) if tangents else None
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    mu = torch.empty_like(lse) if tangents else None
    inputs = (q, k, v, tq, tk, tv)
    specialised = takes_specialised(inputs, mask, window, scale)
    if config is None and specialised:
        config = pick_specialised(q.shape[3], k.shape[2])
    if isinstance(config, SpecialisedConfig):
        run_specialised(inputs, (o, to, lse, mu), specialised, scale, causal, config)
        return o, to, lse, mu
    sizes = (q.shape[0] * q.shape[1], q.shape[1], q.shape[1] // max(1, k.shape[1]), q.shape[2], k.shape[2], q.shape[2])
    launch(inputs, mask, (o, to, lse, mu), None, sizes, scale, causal, window, precision, config)
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
    config: ForwardConfig | None = None,
) -> tuple[Float[Tensor, "tq h dv"], Float[Tensor, "tq h dv"] | None, PackedRows, PackedRows | None]:
    """`forward` for sequences packed one after the other: see `naive_varlen.forward_varlen`.

    Further args: max_seqlen_q and max_seqlen_k, rows of the longest sequence; more is harmless, less leaves rows
    unwritten. o and to are zeros behind the last sequence.
    """
    total, heads, _ = q.shape
    tangents = tq is not None or tk is not None or tv is not None
    o = q.new_zeros(total, heads, v.shape[2])
    to = torch.zeros_like(o) if tangents else None
    lse = q.new_empty(heads, total, dtype=torch.float32)
    mu = torch.empty_like(lse) if tangents else None
    sequences = cu_seqlens_q.shape[0] - 1
    sizes = (sequences * heads, heads, heads // max(1, k.shape[1]), total, max_seqlen_k, max_seqlen_q)
    packed = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    launch((q, k, v, tq, tk, tv), None, (o, to, lse, mu), packed, sizes, scale, causal, window, precision, config)
    return o, to, lse, mu


def run_specialised(inputs, outputs, taken: bool, scale: float, causal: bool, config: SpecialisedConfig) -> None:
    """Run Hopper's kernel, which is imported only here: other GPUs and Triton's interpreter do not need it."""
    if not taken:
        q = inputs[0]
        raise ValueError(
            f"config={config} with q {tuple(q.shape)} {q.dtype} on {q.device}: expected a Hopper GPU, 16 bits, head "
            "dim 64 or 128, all tangents, no mask or window, scale > 0, aligned rows; pass a Config"
        )
    from fullstride.jvp.attention.launch_forward_hopper import launch_specialised

    launch_specialised(inputs, outputs, scale, causal, config)


def launch(inputs, mask, outputs, packed, sizes, scale, causal, window, precision, config) -> None:
    """Run the kernel on a grid of blocks of queries, `sizes`: heads in all, heads, group, len_q, len_k, longest."""
    total, heads, group, len_q, len_k, longest = sizes
    config, tma = chosen(inputs, len_k, mask is not None, precision, config)
    blocks = triton.cdiv(longest, config.block_m)
    q, v = inputs[0], inputs[2]
    limits, sides = band(causal, window, len_k + longest)
    strides = tuple(strides_of(x) for x in (*inputs, *outputs[:2], mask))
    tiles = describe(inputs, config) if tma else inputs
    positions = limits, (heads, group, len_q, len_k, blocks)
    arguments = [*tiles, as_pointer(mask), outputs, packed, strides, scale, *positions]
    edge = mask is not None or scale < 0
    more: dict[str, Any] = {"tma": tma, "edge": edge, "precision": precision, "early": config.early}
    constants = tiling(q, v, strides, config, sides, **more)
    with on_device(q):
        triton_compile.launch(dual_forward, (total * blocks,), arguments, constants)

"""Launches of the kernels of attention's gradients: dense or packed, with masks, causal and windows."""

from dataclasses import replace
from typing import Any

import torch
import triton
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fullstride.device import triton_compile
from fullstride.jvp.attention.backward_keys import key_gradients
from fullstride.jvp.attention.backward_queries import query_gradients
from fullstride.jvp.attention.backward_table import BackwardConfig, Config, pick
from fullstride.jvp.attention.launch_common import (
    as_pointer,
    band,
    capability,
    describe,
    on_device,
    strides_of,
    takes_tma,
    tiling,
)
from fullstride.jvp.attention.recompute import row_sums

# Rows of a program of row_sums.
SUM_ROWS = 32

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Rows = Float[Tensor, "b h lq"]
Mask = Bool[Tensor, "b h lq lk"] | Float[Tensor, "b h lq lk"]
Gradients = tuple[Queries, Keys, Values, Queries | None, Keys | None, Values | None]
PackedQueries = Float[Tensor, "tq h d"]
PackedKeys = Float[Tensor, "tk hk d"]
PackedValues = Float[Tensor, "tk hk dv"]
PackedOutputs = Float[Tensor, "tq h dv"]
PackedRows = Float[Tensor, "h tq"]
PackedGradients = tuple[
    PackedQueries, PackedKeys, PackedValues, PackedQueries | None, PackedKeys | None, PackedValues | None
]


def backward(
    go: Outputs,
    gto: Outputs | None,
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    o: Outputs,
    to: Outputs | None,
    lse: Rows,
    mu: Rows | None,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    precision: str = "ieee",
    config: Config | None = None,
) -> Gradients:
    """Compute the gradients of `forward` from its inputs and outputs, deterministically: see `naive.backward`.

    If a mask hides all of a row by a large negative number instead of -inf, its gradients are inexact, as its weights
    cannot be told from lse. `config` replaces the table's tile sizes.
    """
    sizes = q.shape[0], (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
    options = scale, band(causal, window, q.shape[2] + k.shape[2]), precision
    return _gradients((q, k, v, tq, tk, tv), (go, gto, o, to, lse, mu), mask, None, sizes, options, config)


def backward_varlen(
    go: PackedOutputs,
    gto: PackedOutputs | None,
    q: PackedQueries,
    k: PackedKeys,
    v: PackedValues,
    tq: PackedQueries | None,
    tk: PackedKeys | None,
    tv: PackedValues | None,
    o: PackedOutputs,
    to: PackedOutputs | None,
    lse: PackedRows,
    mu: PackedRows | None,
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
) -> PackedGradients:
    """`backward` for sequences packed one after the other: see `naive_varlen.backward_varlen`.

    Additional arguments: max_seqlen_q and max_seqlen_k, rows of the longest sequence; more is harmless, less leaves
    gradients at zero, as they are behind the last sequence.
    """
    packed = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sizes = cu_seqlens_q.shape[0] - 1, (q.shape[1], k.shape[1]), (max_seqlen_q, max_seqlen_k)
    options = scale, band(causal, window, max_seqlen_q + max_seqlen_k), precision
    return _gradients((q, k, v, tq, tk, tv), (go, gto, o, to, lse, mu), None, packed, sizes, options, config)


def _gradients(tensors: Any, outputs: Any, mask: Any, packed: Any, sizes: Any, options: Any, config: Any) -> Any:
    go, gto, o, to, lse, mu = outputs
    q, k, v, *tangents = tensors
    # No program writes behind the last of packed sequences.
    make = torch.empty_like if packed is None else torch.zeros_like
    grads: dict[str, Any] = {"dq": make(q), "dk": make(k), "dv": make(v)}
    for name, x in zip(("dtq", "dtk", "dtv"), tangents, strict=True):
        grads[name] = None if x is None or gto is None else make(x)
    if config is None:
        config = pick(q.dtype, q.shape[-1], v.shape[-1], gto is not None, capability(q))
    with on_device(q):
        rows = lse, mu, *launch_row_sums(go, gto, o, to, lse)
        for launch in config:
            _launch(launch, grads, (*tensors, go, gto), rows, mask, packed, sizes, options)
    return tuple(grads.values())


def launch_row_sums(go: Tensor, gto: Tensor | None, o: Tensor, to: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Compute rowsum(go o + gto to) and rowsum(gto o), laid out as lse; the latter is not written if gto is None."""
    delta, d2 = torch.empty_like(lse), torch.empty_like(lse)
    heads, length = lse.shape[-2:]
    blocks: Any = triton.cdiv(length, SUM_ROWS)
    tensors = go, gto, o, None if gto is None else to
    if lse.numel():
        strides = tuple(map(strides_of, tensors))
        config = BackwardConfig("", SUM_ROWS, SUM_ROWS, warps=4, stages=3)
        more: dict[str, Any] = {"tma": False, "edge": True, "precision": "ieee"}
        constants = tiling(go, go, (*strides, strides_of(None)), config, (False, False), **more)
        arguments = tensors, (delta, d2), strides, (heads, length, blocks)
        triton_compile.launch(row_sums, (lse.numel() // length * blocks,), arguments, constants)
    return delta, d2


def _launch(
    config: BackwardConfig,
    grads: dict[str, Any],
    tensors: Any,
    rows: Any,
    mask: Any,
    packed: Any,
    sizes: Any,
    options: Any,
) -> None:
    """Fill those of the gradients that a launch makes and that are not None, in one kernel on a grid of blocks."""
    queries = config.of.startswith(("dq", "dtq"))
    names = ("dq", "dtq") if queries else ("dk", "dv", "dtk", "dtv")
    outs = tuple(grads[name] if name in config.of.split() else None for name in names)
    (batch, heads, longest), (scale, (limits, sides), precision) = sizes, options
    block, inner = (config.block_m, config.block_n) if queries else (config.block_n, config.block_m)
    (length, steps), own = (longest, heads[0]) if queries else (longest[::-1], heads[1])
    blocks = -(-length // block)
    if all(x is None for x in outs) or batch * own * blocks == 0:
        return
    q, k, v = tensors[:3]
    strides = tuple(map(strides_of, (*tensors, *outs, mask)))
    tma = config.tma and config.parts == 0 and takes_tma(tensors)
    # The tiles of a mask are loaded ahead too, and take the shared memory of a stage.
    config = config if mask is None else replace(config, stages=min(config.stages, 2))
    row = 2 if packed is None else 0
    shape = *limits, own, heads[0] // max(1, heads[1]), q.shape[row], k.shape[row], blocks
    inputs = describe(tensors, config) if tma else tensors
    edge = packed is not None or steps % inner > 0
    more: dict[str, Any] = {"tma": tma, "edge": edge, "precision": precision, "parts": config.parts}
    constants = tiling(q, v, strides, config, sides, **more)
    arguments = [*inputs, rows, as_pointer(mask), outs, packed, strides, scale, *shape]
    kernel = query_gradients if queries else key_gradients
    triton_compile.launch(kernel, (batch * own * blocks,), arguments, constants)

"""Launches the kernels of attention's gradients: dense or packed, with masks, causal and windows."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fullstride.jvp.attention.backward_table import Config, pick
from fullstride.jvp.attention.launch_backward import Call, launch_row_sums
from fullstride.jvp.attention.launch_common import band, capability, on_device

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
    """The gradients of `forward`, from its inputs and outputs: see `naive.backward`. The same in every run.

    A row all of which a mask hides by a large negative number, and not by -inf, has inexact gradients, as its weights
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

    Args beside its: max_seqlen_q and max_seqlen_k, rows of the longest sequence; more is harmless, less leaves
    gradients at zero, as they are behind the last sequence.
    """
    packed = cu_seqlens_q, cu_seqlens_k
    sizes = cu_seqlens_q.shape[0] - 1, (q.shape[1], k.shape[1]), (max_seqlen_q, max_seqlen_k)
    options = scale, band(causal, window, max_seqlen_q + max_seqlen_k), precision
    return _gradients((q, k, v, tq, tk, tv), (go, gto, o, to, lse, mu), None, packed, sizes, options, config)


def _gradients(tensors: Any, outputs: Any, mask: Any, packed: Any, sizes: Any, options: Any, config: Any) -> Any:
    go, gto, o, to, lse, mu = outputs
    q, k, v, *tangents = tensors
    # No program writes behind the last of packed sequences.
    make = torch.empty_like if packed is None else torch.zeros_like
    dq, dk, dv = make(q), make(k), make(v)
    dtq, dtk, dtv = (None if x is None or gto is None else make(x) for x in tangents)
    if config is None:
        config = pick(q.dtype, q.shape[-1], v.shape[-1], gto is not None, capability(q))
    with on_device(q):
        sums = launch_row_sums(go, gto, o, to, lse)
        call = Call((*tensors, go, gto), (lse, mu, *sums), mask, packed, *sizes, *options)
        for launch in config:
            call.launch(launch, {"dq": dq, "dk": dk, "dv": dv, "dtq": dtq, "dtk": dtk, "dtv": dtv})
    return dq, dk, dv, dtq, dtk, dtv

"""The fused kernel: o = P v and to = (P (tS - mu)) v + P tv in one pass over the keys.

Two accumulators: the sums of P v and of (P tS) v + P tv share the rescaling of an online softmax (arXiv:1805.02867),
and mu o is subtracted at the end, as sum(P (tS - mu)) v = sum((P tS) v) - mu o. Scores are kept in units of log 2.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.band import hide, key_ranges
from fullstride.jvp.attention.tiles import (
    LN2,
    LOG2E,
    aligned,
    contract,
    less,
    load_rows,
    scaled,
    spread,
    store_rows,
    zero_rows,
)


@triton.jit
@no_type_check
def tangent_scores(q, tq, k_tile, tk, head, start, end, C: tl.constexpr, EDGE: tl.constexpr):
    """Compute tq k^T + q tk^T, unscaled; an absent factor is zero; tk with its strides, the others as tiles."""
    QK: tl.constexpr = C.qk
    ts = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    if tq is not None:
        ts = contract(tq, k_tile, ts, C)
    if tk[0] is not None:
        ts = contract(q, load_rows(tk, head, start, end, QK, C.block_n, EDGE, C), ts, C)
    return ts


@triton.jit
@no_type_check
def attend(sums, q, tq, k, v, tk, tv, mask, scale, band, head, kv, first, lengths, lo, hi, C: tl.constexpr,
           EDGE: tl.constexpr):  # fmt: skip
    """Add the keys of [lo, hi) to the sums; without EDGE all rows see all keys. Tensors come with their strides."""
    QK: tl.constexpr = C.qk
    V: tl.constexpr = C.v
    HAS_TS: tl.constexpr = tq is not None or tk[0] is not None
    HAS_T: tl.constexpr = HAS_TS or tv[0] is not None
    o, to, m, total, r = sums
    _, end = lengths
    for start in tl.range(lo, hi, C.block_n, num_stages=C.stages):
        k_tile = load_rows(k, kv, start, end, QK, C.block_n, EDGE, C)
        s = contract(q, k_tile, tl.full([C.block_m, C.block_n], 0.0, tl.float32), C)
        if HAS_TS and C.early:
            ts = tangent_scores(q, tq, k_tile, tk, kv, start, end, C, EDGE)
        if EDGE:
            s = hide(s * (scale * LOG2E), mask, head, first, start, lengths, band, C)
            top = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s - shift[:, None])
        else:
            top = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
            shift = top
            p = tl.exp2(s * (scale * LOG2E) - shift[:, None])
        alpha = tl.exp2(m - shift)
        m = top
        total = total * alpha + tl.sum(p, 1)
        if HAS_TS and not C.early:
            ts = tangent_scores(q, tq, k_tile, tk, kv, start, end, C, EDGE)
        v_tile = load_rows(v, kv, start, end, V, C.block_n, EDGE, C)
        low = p.to(v_tile[0].dtype)
        o = spread(low, v_tile, scaled(o, alpha), C)
        if HAS_T:
            to = scaled(to, alpha)
        if tv[0] is not None:
            to = spread(low, load_rows(tv, kv, start, end, V, C.block_n, EDGE, C), to, C)
        if HAS_TS:
            weights = p * (ts * scale)
            r = r * alpha + tl.sum(weights, 1)
            to = spread(weights.to(v_tile[0].dtype), v_tile, to, C)
    return o, to, m, total, r


@triton.jit
@no_type_check
def dual_forward(q, k, v, tq, tk, tv, mask, outputs, starts, strides, scale, band, sizes, C: tl.constexpr):
    """A block of queries of one head of one batch entry or sequence.

    Inputs are pointers or descriptors of tiles, which Triton 3.6 takes in no tuple. Outputs are o, to, lse and mu.
    Starts are those of packed sequences' queries and keys. Strides are (batch, head, row, column) of the inputs, o, to
    and the mask; those of packed sequences have no batch, and theirs is not read. The band is how far a query sees to
    its left and right. Sizes are heads, query heads to a key head, queries, keys and blocks of queries.
    """
    QK: tl.constexpr = C.qk
    V: tl.constexpr = C.v
    o, to, lse, mu = outputs
    heads, group, len_q, len_k, blocks = sizes
    s_q, s_k, s_v, s_tq, s_tk, s_tv, s_o, s_to = aligned(strides, 8, C.step)
    block = tl.program_id(0) % blocks
    if C.right:
        block = blocks - 1 - block  # longest blocks first, so that the last to start are short
    head = tl.program_id(0) // blocks
    b, h = head // heads, head % heads
    first = block * C.block_m
    rows_at = tl.cast(head, tl.int64) * len_q
    if starts is not None:
        q_at, k_at = tl.load(starts[0] + b), tl.load(starts[1] + b)
        rows_at = tl.cast(h, tl.int64) * len_q + q_at
        len_q, len_k = tl.load(starts[0] + b + 1) - q_at, tl.load(starts[1] + b + 1) - k_at
        if first >= len_q:
            return
        q, o = q + q_at.to(tl.int64) * s_q[2], o + q_at.to(tl.int64) * s_o[2]
        k, v = k + k_at.to(tl.int64) * s_k[2], v + k_at.to(tl.int64) * s_v[2]
        if to is not None:
            to += q_at.to(tl.int64) * s_to[2]
        if tq is not None:
            tq += q_at.to(tl.int64) * s_tq[2]
        if tk is not None:
            tk += k_at.to(tl.int64) * s_tk[2]
        if tv is not None:
            tv += k_at.to(tl.int64) * s_tv[2]
    q_tile = load_rows((q, s_q), (b, h), first, len_q, QK, C.block_m, True, C)
    tq_tile = None
    if tq is not None:
        tq_tile = load_rows((tq, s_tq), (b, h), first, len_q, QK, C.block_m, True, C)
    lowest, zero = tl.full([C.block_m], float("-inf"), tl.float32), tl.full([C.block_m], 0.0, tl.float32)
    sums = zero_rows(C.block_m, V), zero_rows(C.block_m, V), lowest, zero, zero
    lo, full_lo, full_hi, hi = key_ranges(first, (len_q, len_k), band, C)
    # Blocks that the left side cuts, blocks that all rows see whole, and those that the right side or the end cuts.
    for part in tl.static_range(3):
        if part == 2 or not C.edge:
            if part == 0:
                begin, until = lo, tl.minimum(full_lo, hi)
            elif part == 1:
                begin, until = full_lo, full_hi
            else:
                begin, until = lo if C.edge else tl.maximum(full_lo, full_hi), hi
            if part > 0 or C.left:
                sums = attend(sums, q_tile, tq_tile, (k, s_k), (v, s_v), (tk, s_tk), (tv, s_tv), (mask, strides[8]),
                              scale, band, (b, h), (b, h // group), first, (len_q, len_k), begin, until, C,
                              part != 1)  # fmt: skip
    acc, tacc, m, total, r = sums
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    inverse = tl.where(seen, 1.0 / total, 0.0)
    acc = scaled(acc, inverse)
    store_rows((o, s_o), (b, h), first, len_q, acc, V, C)
    rows = first + tl.arange(0, C.block_m)
    tl.store(lse + rows_at + rows, tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf")), mask=rows < len_q)
    if to is not None:
        r *= inverse
        tl.store(mu + rows_at + rows, r, mask=rows < len_q)
        store_rows((to, s_to), (b, h), first, len_q, less(scaled(tacc, inverse), scaled(acc, r)), V, C)

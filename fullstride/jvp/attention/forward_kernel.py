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
def tangent_scores(q, k, tq, tk, tk_strides, b, h, start, end, QK: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
                   INDEX: tl.constexpr):  # fmt: skip
    """Tq k^T + q tk^T, unscaled, of what is there."""
    ts = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    if tq is not None:
        ts = contract(tq, k, ts, PRECISION)
    if tk is not None:
        ts = contract(q, load_rows(tk, tk_strides, b, h, start, end, QK, BLOCK_N, TMA, EDGE, INDEX), ts, PRECISION)
    return ts


@triton.jit
@no_type_check
def attend(o, to, m, total, r, q, tq, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides, mask, mask_strides,
           scale, left, right, b, h, kv, first, len_q, len_k, lo, hi, QK: tl.constexpr, V: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, TMA: tl.constexpr,
           EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
           INDEX: tl.constexpr):  # fmt: skip
    """The keys of [lo, hi) into the accumulators; where not EDGE, all are seen by all rows."""
    HAS_TS: tl.constexpr = tq is not None or tk is not None
    HAS_T: tl.constexpr = HAS_TS or tv is not None
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        k_tile = load_rows(k, k_strides, b, kv, start, len_k, QK, BLOCK_N, TMA, EDGE, INDEX)
        s = contract(q, k_tile, tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), PRECISION)
        if HAS_TS and EARLY:
            ts = tangent_scores(q, k_tile, tq, tk, tk_strides, b, kv, start, len_k, QK, BLOCK_M, BLOCK_N, TMA, EDGE,
                                PRECISION, INDEX)  # fmt: skip
        if EDGE:
            s = hide(s * (scale * LOG2E), mask, mask_strides, b, h, first, start, len_q, len_k, left, right, LEFT,
                     RIGHT, INDEX)  # fmt: skip
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
        if HAS_TS and not EARLY:
            ts = tangent_scores(q, k_tile, tq, tk, tk_strides, b, kv, start, len_k, QK, BLOCK_M, BLOCK_N, TMA, EDGE,
                                PRECISION, INDEX)  # fmt: skip
        v_tile = load_rows(v, v_strides, b, kv, start, len_k, V, BLOCK_N, TMA, EDGE, INDEX)
        low = p.to(v_tile[0].dtype)
        o = spread(low, v_tile, scaled(o, alpha), PRECISION)
        if HAS_T:
            to = scaled(to, alpha)
        if tv is not None:
            tv_tile = load_rows(tv, tv_strides, b, kv, start, len_k, V, BLOCK_N, TMA, EDGE, INDEX)
            to = spread(low, tv_tile, to, PRECISION)
        if HAS_TS:
            weights = p * (ts * scale)
            r = r * alpha + tl.sum(weights, 1)
            to = spread(weights.to(v_tile[0].dtype), v_tile, to, PRECISION)
    return o, to, m, total, r


@triton.jit
@no_type_check
def dual_forward(q, k, v, tq, tk, tv, mask, o, to, lse, mu, cu_q, cu_k, q_strides, k_strides, v_strides, tq_strides,
                 tk_strides, tv_strides, mask_strides, o_strides, to_strides, scale, left, right, heads, group, len_q,
                 len_k, blocks, QK: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 STAGES: tl.constexpr, EARLY: tl.constexpr, TMA: tl.constexpr, ALL_EDGE: tl.constexpr,
                 LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
                 STEP: tl.constexpr):  # fmt: skip
    """A block of queries of one head of one batch entry or sequence.

    Strides are of (batch, head, row, column); those of packed sequences have no batch, and theirs is not read.
    """
    HAS_T: tl.constexpr = to is not None
    q_strides = aligned(q_strides, STEP)
    k_strides = aligned(k_strides, STEP)
    v_strides = aligned(v_strides, STEP)
    if tq is not None:
        tq_strides = aligned(tq_strides, STEP)
    if tk is not None:
        tk_strides = aligned(tk_strides, STEP)
    if tv is not None:
        tv_strides = aligned(tv_strides, STEP)
    o_strides = aligned(o_strides, STEP)
    if to is not None:
        to_strides = aligned(to_strides, STEP)
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block  # the longest first: the last to start are then short
    head = tl.program_id(0) // blocks
    b, h = head // heads, head % heads
    first = block * BLOCK_M
    rows_at = tl.cast(head, tl.int64) * len_q
    if cu_q is not None:
        q_at, k_at = tl.load(cu_q + b), tl.load(cu_k + b)
        rows_at = tl.cast(h, tl.int64) * len_q + q_at
        len_q, len_k = tl.load(cu_q + b + 1) - q_at, tl.load(cu_k + b + 1) - k_at
        if first >= len_q:
            return
        q, o = q + q_at.to(tl.int64) * q_strides[2], o + q_at.to(tl.int64) * o_strides[2]
        k, v = k + k_at.to(tl.int64) * k_strides[2], v + k_at.to(tl.int64) * v_strides[2]
        if HAS_T:
            to += q_at.to(tl.int64) * to_strides[2]
        if tq is not None:
            tq += q_at.to(tl.int64) * tq_strides[2]
        if tk is not None:
            tk += k_at.to(tl.int64) * tk_strides[2]
        if tv is not None:
            tv += k_at.to(tl.int64) * tv_strides[2]
    q_tile = load_rows(q, q_strides, b, h, first, len_q, QK, BLOCK_M, TMA, True, INDEX)
    tq_tile = None
    if tq is not None:
        tq_tile = load_rows(tq, tq_strides, b, h, first, len_q, QK, BLOCK_M, TMA, True, INDEX)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, r = tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], 0.0, tl.float32)
    acc, tacc = zero_rows(BLOCK_M, V), zero_rows(BLOCK_M, V)
    lo, full_lo, full_hi, hi = key_ranges(first, len_q, len_k, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    # Blocks that the left side cuts, blocks that all rows see whole, and those that the right side or the end cuts.
    for part in tl.static_range(3):
        if part == 2 or not ALL_EDGE:
            if part == 0:
                begin, until = lo, tl.minimum(full_lo, hi)
            elif part == 1:
                begin, until = full_lo, full_hi
            else:
                begin, until = lo if ALL_EDGE else tl.maximum(full_lo, full_hi), hi
            if part > 0 or LEFT:
                acc, tacc, m, total, r = attend(acc, tacc, m, total, r, q_tile, tq_tile, k, v, tk, tv, k_strides,
                                                v_strides, tk_strides, tv_strides, mask, mask_strides, scale, left,
                                                right, b, h, h // group, first, len_q, len_k, begin, until, QK, V,
                                                BLOCK_M, BLOCK_N, STAGES, EARLY, TMA, part != 1, LEFT, RIGHT,
                                                PRECISION, INDEX)  # fmt: skip
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    inverse = tl.where(seen, 1.0 / total, 0.0)
    acc = scaled(acc, inverse)
    store_rows(o, o_strides, b, h, first, len_q, acc, V, INDEX)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(lse + rows_at + rows, tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf")), mask=rows < len_q)
    if HAS_T:
        r *= inverse
        tl.store(mu + rows_at + rows, r, mask=rows < len_q)
        store_rows(to, to_strides, b, h, first, len_q, less(scaled(tacc, inverse), scaled(acc, r)), V, INDEX)

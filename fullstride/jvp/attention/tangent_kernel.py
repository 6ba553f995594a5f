"""The derivative alone, where o and lse are known: to = (P tS) v + P tv - mu o, five products and no online softmax."""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.band import hide, key_ranges
from fullstride.jvp.attention.forward_kernel import tangent_scores
from fullstride.jvp.attention.tiles import LOG2E, contract, less, load_rows, scaled, spread, store_rows, zero_rows


@triton.jit
@no_type_check
def gather(to, r, shift, q, tq, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides, mask, mask_strides, scale,
           left, right, b, h, kv, first, len_q, len_k, lo, hi, QK: tl.constexpr, V: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """The keys of [lo, hi) into the accumulator; where not EDGE, all are seen by all rows."""
    HAS_TS: tl.constexpr = tq is not None or tk is not None
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        k_tile = load_rows(k, k_strides, b, kv, start, len_k, QK, BLOCK_N, TMA, EDGE, INDEX)
        s = contract(q, k_tile, tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), PRECISION) * (scale * LOG2E)
        if EDGE:
            s = hide(s, mask, mask_strides, b, h, first, start, len_q, len_k, left, right, LEFT, RIGHT, INDEX)
        p = tl.exp2(s - shift[:, None])
        if HAS_TS:
            ts = tangent_scores(q, k_tile, tq, tk, tk_strides, b, kv, start, len_k, QK, BLOCK_M, BLOCK_N, TMA, EDGE,
                                PRECISION, INDEX)  # fmt: skip
        if tv is not None:
            tv_tile = load_rows(tv, tv_strides, b, kv, start, len_k, V, BLOCK_N, TMA, EDGE, INDEX)
            to = spread(p.to(tv_tile[0].dtype), tv_tile, to, PRECISION)
        if HAS_TS:
            v_tile = load_rows(v, v_strides, b, kv, start, len_k, V, BLOCK_N, TMA, EDGE, INDEX)
            weights = p * (ts * scale)
            r += tl.sum(weights, 1)
            to = spread(weights.to(v_tile[0].dtype), v_tile, to, PRECISION)
    return to, r


@triton.jit
@no_type_check
def tangent(q, k, v, tq, tk, tv, mask, o, to, lse, mu, q_strides, k_strides, v_strides, tq_strides, tk_strides,
            tv_strides, mask_strides, o_strides, to_strides, scale, left, right, heads, group, len_q, len_k, blocks,
            QK: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
            TMA: tl.constexpr, ALL_EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
            PRECISION: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """A block of queries of one head of one batch entry."""
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block  # the longest first: the last to start are then short
    head = tl.program_id(0) // blocks
    b, h = head // heads, head % heads
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    rows_at = tl.cast(head, tl.int64) * len_q + rows
    shift = tl.load(lse + rows_at, mask=rows < len_q, other=0.0)
    shift = tl.where(shift == float("-inf"), 0.0, shift) * LOG2E
    q_tile = load_rows(q, q_strides, b, h, first, len_q, QK, BLOCK_M, TMA, True, INDEX)
    tq_tile = None
    if tq is not None:
        tq_tile = load_rows(tq, tq_strides, b, h, first, len_q, QK, BLOCK_M, TMA, True, INDEX)
    acc, r = zero_rows(BLOCK_M, V), tl.full([BLOCK_M], 0.0, tl.float32)
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
                acc, r = gather(acc, r, shift, q_tile, tq_tile, k, v, tk, tv, k_strides, v_strides, tk_strides,
                                tv_strides, mask, mask_strides, scale, left, right, b, h, h // group, first, len_q,
                                len_k, begin, until, QK, V, BLOCK_M, BLOCK_N, STAGES, TMA, part != 1, LEFT, RIGHT,
                                PRECISION, INDEX)  # fmt: skip
    tl.store(mu + rows_at, r, mask=rows < len_q)
    o_tile = load_rows(o, o_strides, b, h, first, len_q, V, BLOCK_M, False, True, INDEX)
    store_rows(to, to_strides, b, h, first, len_q, less(acc, scaled(o_tile, r)), V, INDEX)

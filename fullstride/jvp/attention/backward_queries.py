"""The kernel of dq and dtq: a program holds a block of queries and walks over the keys; `naive` has the equations.

Registers hold three squares of scores beside the accumulators. So each is used up before the next is made: gtS is
multiplied by tS - mu before go v^T is formed. gto is None for the gradient of a detached tangent. Of dq and dtq one may
be None, so that a configuration can make them in a launch each. With PARTS > 0 squares of scores are formed from that
many columns at a time.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.recompute import dual_products, load_lse2, load_row_numbers, weights
from fullstride.jvp.attention.tiles import aligned, contract, load_rows, spread, store_rows, zero_rows


@triton.jit
@no_type_check
def times(accs, factor):
    main = accs[0] * factor
    tiles = (main,)
    if len(accs) > 1:
        tiles = (main, accs[1] * factor)
    return tiles


@triton.jit
@no_type_check
def sequence(cu_q, cu_k, b, h, heads, len_q, len_k):
    """Of a batch entry or sequence: first query, end, first key, end, and where the head's row numbers start."""
    span = (0, len_q, 0, len_k, (tl.cast(b, tl.int64) * heads + h) * len_q)
    if cu_q is not None:
        at = tl.cast(h, tl.int64) * len_q
        span = (tl.load(cu_q + b), tl.load(cu_q + b + 1), tl.load(cu_k + b), tl.load(cu_k + b + 1), at)
    return span


@triton.jit(do_not_specialize=["left", "right", "heads", "len_q", "len_k", "blocks"])
@no_type_check
def query_gradients(q, k, v, tq, tk, tv, go, gto, lse, mu, delta, d2, mask, dq, dtq, cu_q, cu_k,
                    q_strides, k_strides, v_strides, tq_strides, tk_strides, tv_strides, go_strides, gto_strides,
                    mask_strides, dq_strides, dtq_strides, scale, left, right, heads, group, len_q, len_k, blocks,
                    QK: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    STAGES: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, LEFT: tl.constexpr,
                    RIGHT: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
                    PARTS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """dq and dtq of a block of queries of one head of one batch entry or sequence."""
    TS: tl.constexpr = gto is not None and (tq is not None or tk is not None)
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block  # the longest first: the last to start are then short
    b, h = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    start_q, end_q, start_k, end_k, at = sequence(cu_q, cu_k, b, h, heads, len_q, len_k)
    first = start_q + block * BLOCK_M
    if first >= end_q:
        return
    q_strides = aligned(q_strides, STEP)
    k_strides = aligned(k_strides, STEP)
    v_strides = aligned(v_strides, STEP)
    if tq is not None:
        tq_strides = aligned(tq_strides, STEP)
    if tk is not None:
        tk_strides = aligned(tk_strides, STEP)
    if tv is not None:
        tv_strides = aligned(tv_strides, STEP)
    go_strides = aligned(go_strides, STEP)
    if gto is not None:
        gto_strides = aligned(gto_strides, STEP)
    if dq is not None:
        dq_strides = aligned(dq_strides, STEP)
    if dtq is not None:
        dtq_strides = aligned(dtq_strides, STEP)
    kv = h // group
    lse2 = load_lse2(lse, at, first, end_q, BLOCK_M)[:, None]
    if PARTS == 0:
        q_tile = load_rows(q, q_strides, b, h, first, end_q, QK, BLOCK_M, TMA, True, INDEX)
        if gto is not None:
            gto_tile = load_rows(gto, gto_strides, b, h, first, end_q, V, BLOCK_M, TMA, True, INDEX)
        if dq is not None:
            go_tile = load_rows(go, go_strides, b, h, first, end_q, V, BLOCK_M, TMA, True, INDEX)
            if TS and tq is not None:
                tq_tile = load_rows(tq, tq_strides, b, h, first, end_q, QK, BLOCK_M, TMA, True, INDEX)
    if TS:
        d2s = load_row_numbers(d2, at, first, end_q, BLOCK_M)[:, None]
        mus = load_row_numbers(mu, at, first, end_q, BLOCK_M)[:, None]
    if dtq is not None:
        sum_dtq = zero_rows(BLOCK_M, QK)
    if dq is not None:
        sum_dq = zero_rows(BLOCK_M, QK)
        deltas = load_row_numbers(delta, at, first, end_q, BLOCK_M)[:, None]
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    lo, hi = 0, end_k - start_k
    if LEFT:
        lo = tl.maximum(block * BLOCK_M - left, 0) // BLOCK_N * BLOCK_N
    if RIGHT:
        hi = tl.minimum(hi, (block + 1) * BLOCK_M + right)
    if mask is not None:
        mask += tl.cast(b, tl.int64) * mask_strides[0] + tl.cast(h, tl.int64) * mask_strides[1]
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        n = start_k + start
        k_tile = load_rows(k, k_strides, b, kv, n, end_k, QK, BLOCK_N, TMA, EDGE, INDEX)
        if PARTS > 0:
            p, ts = dual_products(q, tq, k, tk, q_strides, tq_strides, k_strides, tk_strides, b, h, kv, first, end_q, n,
                                  end_k, QK, BLOCK_M, BLOCK_N, PARTS, PRECISION, INDEX)  # fmt: skip
            if gto is None:
                gs, _ = dual_products(go, None, v, None, go_strides, None, v_strides, None, b, h, kv, first, end_q, n,
                                      end_k, V, BLOCK_M, BLOCK_N, PARTS, PRECISION, INDEX)  # fmt: skip
            else:
                gts, gs = dual_products(gto, go, v, tv, gto_strides, go_strides, v_strides, tv_strides, b, h, kv, first,
                                        end_q, n, end_k, V, BLOCK_M, BLOCK_N, PARTS, PRECISION, INDEX)  # fmt: skip
        else:
            p = contract(q_tile, k_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
            v_tile = load_rows(v, v_strides, b, kv, n, end_k, V, BLOCK_N, TMA, EDGE, INDEX)
        p = weights(p, lse2, i, start + tl.arange(0, BLOCK_N)[None, :], mask, mask_strides, scale, end_q - start_q,
                    end_k - start_k, left, right, LEFT, RIGHT, EDGE)  # fmt: skip
        if TS:
            if PARTS == 0:
                gts = contract(gto_tile, v_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
            gts = p * (gts - d2s)
            if dtq is not None:
                sum_dtq = spread(gts.to(k_tile[0].dtype), k_tile, sum_dtq, PRECISION)
        if dq is not None:
            if TS:
                if tk is not None:
                    tk_tile = load_rows(tk, tk_strides, b, kv, n, end_k, QK, BLOCK_N, TMA, EDGE, INDEX)
                    sum_dq = spread(gts.to(k_tile[0].dtype), tk_tile, sum_dq, PRECISION)
                if PARTS == 0:
                    ts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    if tk is not None:
                        ts = contract(q_tile, tk_tile, ts, PRECISION)
                    if tq is not None:
                        ts = contract(tq_tile, k_tile, ts, PRECISION)
                gts *= ts * scale - mus
            if PARTS == 0:
                gs = contract(go_tile, v_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
                if gto is not None and tv is not None:
                    tv_tile = load_rows(tv, tv_strides, b, kv, n, end_k, V, BLOCK_N, TMA, EDGE, INDEX)
                    gs = contract(gto_tile, tv_tile, gs, PRECISION)
            gs = p * (gs - deltas)
            if TS:
                gs += gts
            sum_dq = spread(gs.to(k_tile[0].dtype), k_tile, sum_dq, PRECISION)
    if dq is not None:
        store_rows(dq, dq_strides, b, h, first, end_q, times(sum_dq, scale), QK, INDEX)
    if dtq is not None:
        store_rows(dtq, dtq_strides, b, h, first, end_q, times(sum_dtq, scale), QK, INDEX)

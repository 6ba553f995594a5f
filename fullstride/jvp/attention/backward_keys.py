"""The kernel of dk, dv, dtk and dtv: a program holds a block of keys and walks over the queries of its group of heads.

Squares of scores have keys as rows. The gradients are the sums of one program each, in a fixed order, so that they are
the same in every run. Some of the four may be None: their accumulators are half of all registers, so that it can be
faster to make them in two launches, (dk, dtk) and (dv, dtv), though that takes 15 products for 12. With PARTS > 0
squares of scores are formed from that many columns at a time.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.backward_queries import sequence, times
from fullstride.jvp.attention.recompute import dual_products, load_lse2, load_row_numbers, weights
from fullstride.jvp.attention.tiles import aligned, contract, load_rows, spread, store_rows, zero_rows


@triton.jit(do_not_specialize=["left", "right", "kv_heads", "len_q", "len_k", "blocks"])
@no_type_check
def key_gradients(q, k, v, tq, tk, tv, go, gto, lse, mu, delta, d2, mask, dk, dv, dtk, dtv, cu_q, cu_k,
                  q_strides, k_strides, v_strides, tq_strides, tk_strides, tv_strides, go_strides, gto_strides,
                  mask_strides, dk_strides, dv_strides, dtk_strides, dtv_strides, scale, left, right, kv_heads, group,
                  len_q, len_k, blocks,
                  QK: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  STAGES: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, LEFT: tl.constexpr,
                  RIGHT: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
                  PARTS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The gradients of a block of keys of one key head of one batch entry or sequence."""
    T: tl.constexpr = gto is not None and (tq is not None or tk is not None)
    GS: tl.constexpr = dk is not None
    TS: tl.constexpr = T and (dk is not None or dv is not None)
    GTS: tl.constexpr = T and (dk is not None or dtk is not None)
    block = tl.program_id(0) % blocks
    b, kv = tl.program_id(0) // blocks // kv_heads, tl.program_id(0) // blocks % kv_heads
    start_q, end_q, start_k, end_k, at = sequence(cu_q, cu_k, b, kv, kv_heads, len_q, len_k)
    first = start_k + block * BLOCK_N
    if first >= end_k:
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
    if dk is not None:
        dk_strides = aligned(dk_strides, STEP)
    if dv is not None:
        dv_strides = aligned(dv_strides, STEP)
    if dtk is not None:
        dtk_strides = aligned(dtk_strides, STEP)
    if dtv is not None:
        dtv_strides = aligned(dtv_strides, STEP)
    if PARTS == 0:
        k_tile = load_rows(k, k_strides, b, kv, first, end_k, QK, BLOCK_N, TMA, True, INDEX)
        if TS and tk is not None:
            tk_tile = load_rows(tk, tk_strides, b, kv, first, end_k, QK, BLOCK_N, TMA, True, INDEX)
        if GS or GTS:
            v_tile = load_rows(v, v_strides, b, kv, first, end_k, V, BLOCK_N, TMA, True, INDEX)
        if GS and gto is not None and tv is not None:
            tv_tile = load_rows(tv, tv_strides, b, kv, first, end_k, V, BLOCK_N, TMA, True, INDEX)
    if dk is not None:
        sum_dk = zero_rows(BLOCK_N, QK)
    if dtk is not None:
        sum_dtk = zero_rows(BLOCK_N, QK)
    if dv is not None:
        sum_dv = zero_rows(BLOCK_N, V)
    if dtv is not None:
        sum_dtv = zero_rows(BLOCK_N, V)
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    lo, hi = 0, end_q - start_q
    if RIGHT:
        lo = tl.maximum(block * BLOCK_N - right, 0) // BLOCK_M * BLOCK_M
    if LEFT:
        hi = tl.minimum(hi, (block + 1) * BLOCK_N + left)
    for member in range(group):
        h = kv * group + member
        at = sequence(cu_q, cu_k, b, h, kv_heads * group, len_q, len_k)[4]
        mask_h = mask
        if mask is not None:
            mask_h = mask + tl.cast(b, tl.int64) * mask_strides[0] + tl.cast(h, tl.int64) * mask_strides[1]
        for start in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
            m = start_q + start
            q_tile = load_rows(q, q_strides, b, h, m, end_q, QK, BLOCK_M, TMA, EDGE, INDEX)
            if PARTS > 0:
                p, ts = dual_products(k, tk, q, tq, k_strides, tk_strides, q_strides, tq_strides, b, kv, h, first,
                                      end_k, m, end_q, QK, BLOCK_N, BLOCK_M, PARTS, PRECISION, INDEX)  # fmt: skip
                if gto is None:
                    gs, _ = dual_products(v, None, go, None, v_strides, None, go_strides, None, b, kv, h, first, end_k,
                                          m, end_q, V, BLOCK_N, BLOCK_M, PARTS, PRECISION, INDEX)  # fmt: skip
                else:
                    gts, gs = dual_products(v, tv, gto, go, v_strides, tv_strides, gto_strides, go_strides, b, kv, h,
                                            first, end_k, m, end_q, V, BLOCK_N, BLOCK_M, PARTS, PRECISION,
                                            INDEX)  # fmt: skip
            else:
                p = contract(k_tile, q_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
            p = weights(p, load_lse2(lse, at, m, end_q, BLOCK_M)[None, :], start + tl.arange(0, BLOCK_M)[None, :], j,
                        mask_h, mask_strides, scale, end_q - start_q, end_k - start_k, left, right, LEFT, RIGHT,
                        EDGE)  # fmt: skip
            if GS or dv is not None:
                go_tile = load_rows(go, go_strides, b, h, m, end_q, V, BLOCK_M, TMA, EDGE, INDEX)
            if gto is not None:
                gto_tile = load_rows(gto, gto_strides, b, h, m, end_q, V, BLOCK_M, TMA, EDGE, INDEX)
            if dv is not None:
                sum_dv = spread(p.to(q_tile[0].dtype), go_tile, sum_dv, PRECISION)
            if dtv is not None:
                sum_dtv = spread(p.to(q_tile[0].dtype), gto_tile, sum_dtv, PRECISION)
            if TS and tq is not None:
                tq_tile = load_rows(tq, tq_strides, b, h, m, end_q, QK, BLOCK_M, TMA, EDGE, INDEX)
            if TS:
                if PARTS == 0:
                    ts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    if tk is not None:
                        ts = contract(tk_tile, q_tile, ts, PRECISION)
                    if tq is not None:
                        ts = contract(k_tile, tq_tile, ts, PRECISION)
                ts = ts * scale - load_row_numbers(mu, at, m, end_q, BLOCK_M)[None, :]
                if dv is not None:
                    sum_dv = spread((p * ts).to(q_tile[0].dtype), gto_tile, sum_dv, PRECISION)
            if GTS:
                if PARTS == 0:
                    gts = contract(v_tile, gto_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
                gts = p * (gts - load_row_numbers(d2, at, m, end_q, BLOCK_M)[None, :])
                if dtk is not None:
                    sum_dtk = spread(gts.to(q_tile[0].dtype), q_tile, sum_dtk, PRECISION)
            if GS:
                if T:
                    if tq is not None:
                        sum_dk = spread(gts.to(q_tile[0].dtype), tq_tile, sum_dk, PRECISION)
                    gts *= ts
                if PARTS == 0:
                    gs = contract(v_tile, go_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
                    if gto is not None and tv is not None:
                        gs = contract(tv_tile, gto_tile, gs, PRECISION)
                gs = p * (gs - load_row_numbers(delta, at, m, end_q, BLOCK_M)[None, :])
                if T:
                    gs += gts
                sum_dk = spread(gs.to(q_tile[0].dtype), q_tile, sum_dk, PRECISION)
    if dk is not None:
        store_rows(dk, dk_strides, b, kv, first, end_k, times(sum_dk, scale), QK, INDEX)
    if dtk is not None:
        store_rows(dtk, dtk_strides, b, kv, first, end_k, times(sum_dtk, scale), QK, INDEX)
    if dv is not None:
        store_rows(dv, dv_strides, b, kv, first, end_k, sum_dv, V, INDEX)
    if dtv is not None:
        store_rows(dtv, dtv_strides, b, kv, first, end_k, sum_dtv, V, INDEX)

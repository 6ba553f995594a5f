"""The kernel of dk, dv, dtk and dtv: a program holds a block of keys and walks over the queries of its group of heads.

Squares of scores have keys as rows. The gradients are the sums of one program each, in a fixed order, so that they are
the same in every run. Some of the four may be None: their accumulators are half of all registers, so that it can be
faster to make them in two launches, (dk, dtk) and (dv, dtv), though that takes 15 products for 12. With PARTS > 0
squares of scores are formed from that many columns at a time.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.backward_queries import head_of, sequence, times
from fullstride.jvp.attention.recompute import dual_products, load_lse2, load_row_numbers, weights
from fullstride.jvp.attention.tiles import aligned, contract, load_rows, spread, store_rows, zero_rows


@triton.jit(do_not_specialize=["left", "right", "kv_heads", "len_q", "len_k", "blocks"])
@no_type_check
def key_gradients(q, k, v, tq, tk, tv, go, gto, rows, mask, grads, starts, strides, scale, left, right,
                  kv_heads, group, len_q, len_k, blocks, C: tl.constexpr):  # fmt: skip
    """The gradients of a block of keys of one key head of one batch entry or sequence.

    The arguments are those of `query_gradients`, but that `grads` are dk, dv, dtk and dtv, and `blocks` those of keys.
    """
    lse, mu, delta, d2 = rows
    dk, dv, dtk, dtv = grads
    lengths = len_q, len_k
    QK: tl.constexpr = C.qk
    V: tl.constexpr = C.v
    BLOCK_M: tl.constexpr = C.block_m
    BLOCK_N: tl.constexpr = C.block_n
    EDGE: tl.constexpr = C.edge
    T: tl.constexpr = gto is not None and (tq is not None or tk is not None)
    GS: tl.constexpr = dk is not None
    TS: tl.constexpr = T and (dk is not None or dv is not None)
    GTS: tl.constexpr = T and (dk is not None or dtk is not None)
    block = tl.program_id(0) % blocks
    b, head = tl.program_id(0) // blocks // kv_heads, tl.program_id(0) // blocks % kv_heads
    start_q, end_q, start_k, end_k, at = sequence(starts, b, head, kv_heads, lengths)
    first = start_k + block * BLOCK_N
    if first >= end_k:
        return
    s_q, s_k, s_v, s_tq, s_tk, s_tv, s_go, s_gto, s_dk, s_dv, s_dtk, s_dtv = aligned(strides, 12, C.step)
    kv = b, head
    band = left, right
    if C.parts == 0:
        k_tile = load_rows((k, s_k), kv, first, end_k, QK, BLOCK_N, True, C)
        if TS and tk is not None:
            tk_tile = load_rows((tk, s_tk), kv, first, end_k, QK, BLOCK_N, True, C)
        if GS or GTS:
            v_tile = load_rows((v, s_v), kv, first, end_k, V, BLOCK_N, True, C)
        if GS and gto is not None and tv is not None:
            tv_tile = load_rows((tv, s_tv), kv, first, end_k, V, BLOCK_N, True, C)
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
    if C.right:
        lo = tl.maximum(block * BLOCK_N - right, 0) // BLOCK_M * BLOCK_M
    if C.left:
        hi = tl.minimum(hi, (block + 1) * BLOCK_N + left)
    for member in range(group):
        own = b, head * group + member
        at = sequence(starts, b, own[1], kv_heads * group, lengths)[4]
        mask_h = mask
        if mask is not None:
            mask_h = head_of(mask, strides[12], b, own[1])
        for start in tl.range(lo, hi, BLOCK_M, num_stages=C.stages):
            m = start_q + start
            q_tile = load_rows((q, s_q), own, m, end_q, QK, BLOCK_M, EDGE, C)
            if C.parts > 0:
                spans = (first, end_k), (m, end_q)
                p, ts = dual_products((k, s_k), (tk, s_tk), (q, s_q), (tq, s_tq), kv, own, spans[0], spans[1], QK[0],
                                      BLOCK_N, BLOCK_M, C)  # fmt: skip
                if gto is None:
                    gs, _ = dual_products((v, s_v), (None, 0), (go, s_go), (None, 0), kv, own, spans[0], spans[1], V[0],
                                          BLOCK_N, BLOCK_M, C)  # fmt: skip
                else:
                    gts, gs = dual_products((v, s_v), (tv, s_tv), (gto, s_gto), (go, s_go), kv, own, spans[0], spans[1],
                                            V[0], BLOCK_N, BLOCK_M, C)  # fmt: skip
            else:
                p = contract(k_tile, q_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), C)
            p = weights(p, load_lse2(lse, at, m, end_q, BLOCK_M)[None, :], start + tl.arange(0, BLOCK_M)[None, :], j,
                        mask_h, strides[12], scale, (end_q - start_q, end_k - start_k), band, C)  # fmt: skip
            if GS or dv is not None:
                go_tile = load_rows((go, s_go), own, m, end_q, V, BLOCK_M, EDGE, C)
            if gto is not None:
                gto_tile = load_rows((gto, s_gto), own, m, end_q, V, BLOCK_M, EDGE, C)
            if dv is not None:
                sum_dv = spread(p.to(q_tile[0].dtype), go_tile, sum_dv, C)
            if dtv is not None:
                sum_dtv = spread(p.to(q_tile[0].dtype), gto_tile, sum_dtv, C)
            if TS and tq is not None:
                tq_tile = load_rows((tq, s_tq), own, m, end_q, QK, BLOCK_M, EDGE, C)
            if TS:
                if C.parts == 0:
                    ts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    if tk is not None:
                        ts = contract(tk_tile, q_tile, ts, C)
                    if tq is not None:
                        ts = contract(k_tile, tq_tile, ts, C)
                ts = ts * scale - load_row_numbers(mu, at, m, end_q, BLOCK_M)[None, :]
                if dv is not None:
                    sum_dv = spread((p * ts).to(q_tile[0].dtype), gto_tile, sum_dv, C)
            if GTS:
                if C.parts == 0:
                    gts = contract(v_tile, gto_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), C)
                gts = p * (gts - load_row_numbers(d2, at, m, end_q, BLOCK_M)[None, :])
                if dtk is not None:
                    sum_dtk = spread(gts.to(q_tile[0].dtype), q_tile, sum_dtk, C)
            if GS:
                if T:
                    if tq is not None:
                        sum_dk = spread(gts.to(q_tile[0].dtype), tq_tile, sum_dk, C)
                    gts *= ts
                if C.parts == 0:
                    gs = contract(v_tile, go_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), C)
                    if gto is not None and tv is not None:
                        gs = contract(tv_tile, gto_tile, gs, C)
                gs = p * (gs - load_row_numbers(delta, at, m, end_q, BLOCK_M)[None, :])
                if T:
                    gs += gts
                sum_dk = spread(gs.to(q_tile[0].dtype), q_tile, sum_dk, C)
    if dk is not None:
        store_rows((dk, s_dk), kv, first, end_k, times(sum_dk, scale), QK, C)
    if dtk is not None:
        store_rows((dtk, s_dtk), kv, first, end_k, times(sum_dtk, scale), QK, C)
    if dv is not None:
        store_rows((dv, s_dv), kv, first, end_k, sum_dv, V, C)
    if dtv is not None:
        store_rows((dtv, s_dtv), kv, first, end_k, sum_dtv, V, C)

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
def sequence(starts, b, h, heads, lengths):
    """Return the first query, end, first key, end of a batch entry or sequence, and its head's first row number."""
    len_q, len_k = lengths
    span = (0, len_q, 0, len_k, (tl.cast(b, tl.int64) * heads + h) * len_q)
    if starts is not None:
        cu_q, cu_k = starts
        at = tl.cast(h, tl.int64) * len_q
        span = (tl.load(cu_q + b), tl.load(cu_q + b + 1), tl.load(cu_k + b), tl.load(cu_k + b + 1), at)
    return span


@triton.jit
@no_type_check
def head_of(mask, strides, b, h):
    """A head's mask, which must be there, with its strides."""
    return mask + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]


@triton.jit(do_not_specialize=["left", "right", "heads", "len_q", "len_k", "blocks"])
@no_type_check
def query_gradients(q, k, v, tq, tk, tv, go, gto, rows, mask, grads, starts, strides, scale, left, right,
                    heads, group, len_q, len_k, blocks, C: tl.constexpr):  # fmt: skip
    """dq and dtq of a block of queries of one head of one batch entry or sequence.

    Inputs are pointers or descriptors of tiles, which Triton 3.6 takes in no tuple. Rows are lse, mu, delta and d2;
    grads are dq and dtq. Starts and strides are as in `dual_forward`: those of the inputs, the gradients and the mask.
    What must not be specialised stands by itself: Triton 3.6 specialises every number of a tuple.
    """
    lse, mu, delta, d2 = rows
    dq, dtq = grads
    QK: tl.constexpr = C.qk
    V: tl.constexpr = C.v
    BLOCK_M: tl.constexpr = C.block_m
    BLOCK_N: tl.constexpr = C.block_n
    EDGE: tl.constexpr = C.edge
    TS: tl.constexpr = gto is not None and (tq is not None or tk is not None)
    block = tl.program_id(0) % blocks
    if C.right:
        block = blocks - 1 - block  # longest blocks first, so that the last to start are short
    b, h = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    start_q, end_q, start_k, end_k, at = sequence(starts, b, h, heads, (len_q, len_k))
    first = start_q + block * BLOCK_M
    if first >= end_q:
        return
    s_q, s_k, s_v, s_tq, s_tk, s_tv, s_go, s_gto, s_dq, s_dtq = aligned(strides, 10, C.step)
    own, kv = (b, h), (b, h // group)
    band = left, right
    lse2 = load_lse2(lse, at, first, end_q, BLOCK_M)[:, None]
    if C.parts == 0:
        q_tile = load_rows((q, s_q), own, first, end_q, QK, BLOCK_M, True, C)
        if gto is not None:
            gto_tile = load_rows((gto, s_gto), own, first, end_q, V, BLOCK_M, True, C)
        if dq is not None:
            go_tile = load_rows((go, s_go), own, first, end_q, V, BLOCK_M, True, C)
            if TS and tq is not None:
                tq_tile = load_rows((tq, s_tq), own, first, end_q, QK, BLOCK_M, True, C)
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
    if C.left:
        lo = tl.maximum(block * BLOCK_M - left, 0) // BLOCK_N * BLOCK_N
    if C.right:
        hi = tl.minimum(hi, (block + 1) * BLOCK_M + right)
    if mask is not None:
        mask = head_of(mask, strides[10], b, h)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=C.stages):
        n = start_k + start
        k_tile = load_rows((k, s_k), kv, n, end_k, QK, BLOCK_N, EDGE, C)
        if C.parts > 0:
            spans = (first, end_q), (n, end_k)
            p, ts = dual_products((q, s_q), (tq, s_tq), (k, s_k), (tk, s_tk), own, kv, spans[0], spans[1], QK[0],
                                  BLOCK_M, BLOCK_N, C)  # fmt: skip
            if gto is None:
                gs, _ = dual_products((go, s_go), (None, 0), (v, s_v), (None, 0), own, kv, spans[0], spans[1], V[0],
                                      BLOCK_M, BLOCK_N, C)  # fmt: skip
            else:
                gts, gs = dual_products((gto, s_gto), (go, s_go), (v, s_v), (tv, s_tv), own, kv, spans[0], spans[1],
                                        V[0], BLOCK_M, BLOCK_N, C)  # fmt: skip
        else:
            p = contract(q_tile, k_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), C)
            v_tile = load_rows((v, s_v), kv, n, end_k, V, BLOCK_N, EDGE, C)
        p = weights(p, lse2, i, start + tl.arange(0, BLOCK_N)[None, :], mask, strides[10], scale,
                    (end_q - start_q, end_k - start_k), band, C)  # fmt: skip
        if TS:
            if C.parts == 0:
                gts = contract(gto_tile, v_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), C)
            gts = p * (gts - d2s)
            if dtq is not None:
                sum_dtq = spread(gts.to(k_tile[0].dtype), k_tile, sum_dtq, C)
        if dq is not None:
            if TS:
                if tk is not None:
                    tk_tile = load_rows((tk, s_tk), kv, n, end_k, QK, BLOCK_N, EDGE, C)
                    sum_dq = spread(gts.to(k_tile[0].dtype), tk_tile, sum_dq, C)
                if C.parts == 0:
                    ts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    if tk is not None:
                        ts = contract(q_tile, tk_tile, ts, C)
                    if tq is not None:
                        ts = contract(tq_tile, k_tile, ts, C)
                gts *= ts * scale - mus
            if C.parts == 0:
                gs = contract(go_tile, v_tile, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), C)
                if gto is not None and tv is not None:
                    tv_tile = load_rows((tv, s_tv), kv, n, end_k, V, BLOCK_N, EDGE, C)
                    gs = contract(gto_tile, tv_tile, gs, C)
            gs = p * (gs - deltas)
            if TS:
                gs += gts
            sum_dq = spread(gs.to(k_tile[0].dtype), k_tile, sum_dq, C)
    if dq is not None:
        store_rows((dq, s_dq), own, first, end_q, times(sum_dq, scale), QK, C)
    if dtq is not None:
        store_rows((dtq, s_dtq), own, first, end_q, times(sum_dtq, scale), QK, C)

"""The fused forward for Hopper, in Gluon: one warp copies tiles, two groups of four warps each hold 64 queries.

While a group is at its exponentials, the other's products keep the tensor cores busy; within a group, the products of
the tangent of the scores run during the exponentials. With TURNS, a group issues the products of one block's values
and of the next block's keys together, and then lets the other do so. All three tangents are present; keys and queries
may be of any length, and causal. The mathematics is that of `forward_kernel`.
"""

from typing import NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fullstride.jvp.attention.tiles import LN2, LOG2E

# Queries of a group: the rows of one wgmma instruction of four warps.
ROWS = gl.constexpr(64)


class Options(NamedTuple):
    """The constants of the kernel.

    Attributes:
        causal: whether a query sees no later key.
        edge: whether any block of keys may be cut, by that or by the end.
        stages: blocks of keys and values in shared memory.
        turns: whether the two groups take turns at the tensor cores.

    """

    causal: bool
    edge: bool
    stages: int
    turns: bool


@gluon.jit
@no_type_check
def copy_tiles(descs, buffers, barriers, place, C: gl.constexpr):
    """The warp that copies: queries of both groups once, then keys and values as their buffers become free."""
    q, k, v, tq, tk, tv = descs
    q_at, k_at, v_at, tq_at, tk_at, tv_at = buffers
    q_ready, k_ready, v_ready, k_free, v_free, _ = barriers
    b, h, kv, first, _, blocks = place
    mbarrier.expect(q_ready, 2 * (q.block_type.nbytes + tq.block_type.nbytes))
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(q, [b, h, first + group * ROWS, 0], q_ready, q_at.index(group))
        tma.async_copy_global_to_shared(tq, [b, h, first + group * ROWS, 0], q_ready, tq_at.index(group))
    for i in range(blocks):
        slot, phase = i % C.stages, i // C.stages & 1
        start = i * k.block_type.shape[2]
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_ready.index(slot), k.block_type.nbytes + tk.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [b, kv, start, 0], k_ready.index(slot), k_at.index(slot))
        tma.async_copy_global_to_shared(tk, [b, kv, start, 0], k_ready.index(slot), tk_at.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_ready.index(slot), v.block_type.nbytes + tv.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [b, kv, start, 0], v_ready.index(slot), v_at.index(slot))
        tma.async_copy_global_to_shared(tv, [b, kv, start, 0], v_ready.index(slot), tv_at.index(slot))


@gluon.jit
@no_type_check
def flat(buffer):
    """A tile (1, 1, rows, columns) as (rows, columns)."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
@no_type_check
def step(i, sums, buffers, barriers, group, first, scale, len_k, EDGE: gl.constexpr, C: gl.constexpr, S: gl.constexpr,
         ACC: gl.constexpr):  # fmt: skip
    """Add one block of keys to the sums; without EDGE all rows see all keys."""
    o, to, m, total, r = sums
    q_at, k_at, v_at, tq_at, tk_at, tv_at = buffers
    _, k_ready, v_ready, k_free, v_free, turn = barriers
    BLOCK: gl.constexpr = k_at.shape[3]
    slot, phase = i % C.stages, i // C.stages & 1
    q, tq = flat(q_at.index(group)), flat(tq_at.index(group))
    k, tk = flat(k_at.index(slot)).permute([1, 0]), flat(tk_at.index(slot)).permute([1, 0])
    zeros = gl.full([ROWS, BLOCK], 0.0, gl.float32, S)
    mbarrier.wait(k_ready.index(slot), phase)
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    ts = warpgroup_mma(tq, k, zeros, use_acc=False, is_async=True)
    ts = warpgroup_mma(q, tk, ts, is_async=True)
    if C.turns:
        mbarrier.arrive(turn.index(1 - group), pred=group + i > 0)
    s = warpgroup_mma_wait(2, [s])
    if EDGE:
        j = i * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, S))[None, :]
        visible = j < len_k
        if C.causal:
            visible = visible & (j <= first + gl.arange(0, ROWS, gl.SliceLayout(1, S))[:, None])
        s = gl.where(visible, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * (scale * LOG2E))
    p = gl.exp2(s * (scale * LOG2E) - top[:, None])
    alpha = gl.exp2(m - top)
    total = total * alpha + gl.sum(p, 1)
    rescale = gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
    o, to = o * rescale, to * rescale
    # Before the wait for ts: the branch in it keeps the assembler from moving the exponentials behind that wait.
    mbarrier.wait(v_ready.index(slot), phase)
    ts = warpgroup_mma_wait(0, [ts])
    mbarrier.arrive(k_free.index(slot))
    weights = p * (ts * scale)
    r = r * alpha + gl.sum(weights, 1)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    low, weights = gl.convert_layout(p.to(k_at.dtype), A), gl.convert_layout(weights.to(k_at.dtype), A)
    v, tv = flat(v_at.index(slot)), flat(tv_at.index(slot))
    if C.turns:
        mbarrier.wait(turn.index(group), i & 1)
    o = warpgroup_mma(low, v, o, is_async=True)
    to = warpgroup_mma(low, tv, to, is_async=True)
    to = warpgroup_mma(weights, v, to, is_async=True)
    o, to = warpgroup_mma_wait(0, [o, to])
    mbarrier.arrive(v_free.index(slot))
    return o, to, top, total, r


@gluon.jit
@no_type_check
def attend(group: gl.constexpr, outputs, buffers, barriers, place, sizes, scale, C: gl.constexpr, S: gl.constexpr,
           ACC: gl.constexpr):  # fmt: skip
    """A group's 64 queries: all blocks of keys, then the outputs through the queries' buffers."""
    o_desc, to_desc, lse, mu = outputs
    q_at, _, v_at, tq_at, _, _ = buffers
    b, h, _, block_first, whole, blocks = place
    len_q, len_k, rows_at = sizes
    first = block_first + group * ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total, r = gl.full([ROWS], 0.0, gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    o = gl.full([ROWS, v_at.shape[4]], 0.0, gl.float32, ACC)
    to = gl.full([ROWS, v_at.shape[4]], 0.0, gl.float32, ACC)
    sums = o, to, m, total, r
    mbarrier.wait(barriers[0], 0)
    for i in range(whole):
        sums = step(i, sums, buffers, barriers, group, first, scale, len_k, False, C, S, ACC)
    if C.edge:
        for i in range(whole, blocks):
            sums = step(i, sums, buffers, barriers, group, first, scale, len_k, True, C, S, ACC)
    if C.turns:
        mbarrier.arrive(barriers[5].index(1 - group), pred=group == 0)
    o, to, m, total, r = sums
    inverse, r = 1.0 / total, r / total
    rows = first + gl.arange(0, ROWS, ROW)
    gl.store(lse + rows_at + rows, (m + gl.log2(total)) * LN2, mask=rows < len_q)
    gl.store(mu + rows_at + rows, r, mask=rows < len_q)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
    r = gl.convert_layout(r, gl.SliceLayout(1, ACC))[:, None]
    o = o * inverse
    flat(q_at.index(group)).store(o.to(q_at.dtype))
    flat(tq_at.index(group)).store((to * inverse - o * r).to(q_at.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(o_desc, [b, h, first, 0], q_at.index(group))
    tma.async_copy_shared_to_global(to_desc, [b, h, first, 0], tq_at.index(group))
    tma.store_wait(0)


@gluon.jit
@no_type_check
def dual_forward_hopper(q, k, v, tq, tk, tv, o, to, rows, scale, sizes, C: gl.constexpr):
    """128 queries of one head of one batch entry.

    Rows are lse and mu. Sizes are heads, query heads to a key head, queries, keys and blocks of queries. The others
    are descriptors of tiles, which Triton 3.6 takes in no tuple.
    """
    STAGES: gl.constexpr = C.stages
    heads, group, len_q, len_k, row_blocks = sizes
    D: gl.constexpr = q.block_type.shape[3]
    V: gl.constexpr = v.block_type.shape[3]
    BLOCK: gl.constexpr = k.block_type.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    block = gl.program_id(0) % row_blocks
    if C.causal:
        block = row_blocks - 1 - block  # longest blocks first, so that the last to start are short
    head = gl.program_id(0) // row_blocks
    b, h = head // heads, head % heads
    first = block * 2 * ROWS
    whole, blocks = len_k // BLOCK, gl.cdiv(len_k, BLOCK)
    if C.causal:
        whole = gl.minimum(whole, (first + 1) // BLOCK)
        blocks = gl.minimum(blocks, gl.cdiv(gl.minimum(first + 2 * ROWS, len_q), BLOCK))

    q_at = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D], q.layout)
    tq_at = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D], q.layout)
    k_at = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK, D], k.layout)
    tk_at = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK, D], k.layout)
    v_at = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK, V], v.layout)
    tv_at = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK, V], v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)

    buffers = (q_at, k_at, v_at, tq_at, tk_at, tv_at)
    barriers = (q_ready, k_ready, v_ready, k_free, v_free, turn)
    place = (b, h, h // group, first, whole, blocks)
    outputs = (o, to, rows[0], rows[1])
    lengths = (len_q, len_k, head.to(gl.int64) * len_q)
    gl.warp_specialize(
        [
            (attend, (0, outputs, buffers, barriers, place, lengths, scale, C, S, ACC)),
            (attend, (1, outputs, buffers, barriers, place, lengths, scale, C, S, ACC)),
            (copy_tiles, ((q, k, v, tq, tk, tv), buffers, barriers, place, C)),
        ],
        [4, 1],
        [240, 24],
    )

"""Keys that a block of queries sees: ranges of key blocks, and scores with hidden keys at -inf."""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.tiles import LOG2E, LOWEST


@triton.jit
@no_type_check
def key_ranges(first, lengths, band, C: tl.constexpr):
    """lo, full_lo, full_hi, hi: no row sees a key outside [lo, hi), every row sees all of [full_lo, full_hi).

    All but hi are multiples of a block; full_hi may lie below full_lo, and full_lo above hi, if no block is full.
    """
    len_q, len_k = lengths
    left, right = band
    BLOCK: tl.constexpr = C.block_n
    last = tl.minimum(first + C.block_m, len_q) - 1
    lo = first * 0
    full_lo = lo
    hi = len_k
    full_hi = len_k // BLOCK * BLOCK
    if C.left:
        lo = tl.maximum(first - left, 0) // BLOCK * BLOCK
        full_lo = tl.cdiv(tl.maximum(last - left, 0), BLOCK) * BLOCK
    if C.right:
        hi = tl.minimum(hi, last + right + 1)
        full_hi = tl.minimum(hi, first + right + 1) // BLOCK * BLOCK
    return lo, full_lo, full_hi, hi


@triton.jit
@no_type_check
def hide(s, mask, head, first, start, lengths, band, C: tl.constexpr):
    """Scores (in units of log 2) of a tile with the mask added, and -inf if a row does not see a key."""
    len_q, len_k = lengths
    left, right = band
    b, h = head
    x, strides = mask
    i = first + tl.arange(0, s.shape[0])[:, None]
    j = start + tl.arange(0, s.shape[1])[None, :]
    visible = j < len_k
    if C.left:
        visible &= j >= i - left
    if C.right:
        visible &= j <= i + right
    if x is not None:
        base = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
        base += tl.cast(first, tl.int64) * strides[2] + tl.cast(start, tl.int64) * strides[3]
        place = base + ((i - first).to(C.index) * strides[2] + (j - start).to(C.index) * strides[3])
        tile = tl.load(place, mask=visible & (i < len_q), other=0)
        if x.dtype.element_ty.is_int():
            visible &= tile != 0
        else:
            added = tile.to(tl.float32)
            s += tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST)) * LOG2E
    return tl.where(visible, s, float("-inf"))

"""Launches of the norms' kernels that are worth a measurement, beside those that the tables hold.

What decides is how many warps a multiprocessor holds and how many instructions an element takes, which
`compile_norms` shows without a GPU; only what is close by these two is listed.
"""

from collections.abc import Iterator

from fullstride.jvp.norms.group_configs import GroupConfig, Size, on_chip
from fullstride.jvp.norms.launch import padded
from fullstride.jvp.norms.row_configs import EVERY, RowConfig

LARGEST = {"forward": 16384, "detached": 16384, "full": 4096}


def rows(work: str, length: int, modulated: bool) -> Iterator[RowConfig]:
    """For LayerNorm, RMSNorm, adaptive LayerNorm: a row to a warp forward, to four warps backward."""
    width = 128 if length <= 640 else 256
    if work == "forward":
        for warps in (4, 1):
            for programs in (4096, 1024) if modulated else (EVERY, 4224 // warps):
                yield RowConfig(width, warps * 256 // width, warps, programs)
        yield RowConfig(256, 1, 4, 1056, 3, keep=True)
        return
    least = 256 // width
    for tile_rows, programs, stages in ((1, 528, 1), (1, 528, 3), (1, 396, 2), (2, 528, 2), (1, 924, 2)):
        yield RowConfig(width, tile_rows * least, 4, programs, stages)
    for programs in (264, 528):
        yield RowConfig(width, 2 * least, 8, programs, 2)


def groups(work: str, size: Size) -> Iterator[GroupConfig]:
    """For GroupNorm: in channels_last 32 and 64 bytes side by side; many warps, or many elements to a thread."""
    pad = padded(size.group_channels)
    for wide in (32, 64) if size.channels_last else (0,):
        count = max(1, wide // (size.element_bytes * pad))
        elements = count * pad * size.pixels
        if elements <= LARGEST[work]:
            for thread in (16,) if work == "full" else (32,) if elements > 8192 else (16, 32):
                yield on_chip(size, count, thread)
        if size.element_bytes == 2 and elements >= 4096:
            for thread in (32, 64):
                if 4 <= elements // (32 * thread) <= 16 and elements <= 32768:
                    yield on_chip(size, count, thread, packed=True)
    if pad * size.pixels >= 16384:
        yield GroupConfig(max(1, 32 // (size.element_bytes * pad)), 128, 4, 3)

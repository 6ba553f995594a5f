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
    """For LayerNorm, RMSNorm, adaptive LayerNorm: a row to a warp or two; three tiles under way where programs walk."""
    width = 128 if length <= 640 else 256
    if work == "forward":
        yield RowConfig(width, 1024 // width, 4, EVERY)
        for warps, programs in ((1, 2112), (2, 1056), (2, 2112), (4, 528)) if modulated else ():
            yield RowConfig(width, 1, warps, programs, 3, keep=True)
        return
    for warps, programs in ((1, 1056), (1, 2112), (2, 528), (2, 1056)):
        yield RowConfig(width, 1, warps, programs, 3, keep=True)
    yield RowConfig(width, 2, 1, 1056, 3, keep=True)
    yield RowConfig(width, 256 // width, 4, 528, 1)
    if length > 768:
        for warps in (2, 4):
            yield RowConfig(512, 1, warps, 2112 // (2 * warps), 3, keep=True)


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

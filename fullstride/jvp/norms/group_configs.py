"""Launch configurations of the GroupNorm kernels, by the work, the layout and the size of a group."""

from dataclasses import dataclass
from typing import NamedTuple

from fullstride.jvp.norms.launch import ceil_div, padded


@dataclass(frozen=True)
class GroupConfig:
    """A launch.

    Attributes:
        groups: number of groups side by side in a tile.
        pixels: number of pixels of a tile; if it is at least a group's, the group stays on the chip.
        warps: number of warps of a program.
        stages: number of tiles in flight if a program loops over a group.
        chunks: maximum number of programs that share a group's pixels.
        pieces: number of pieces of a tile that stays on the chip.
        packed: whether 16-bit tensors stay there in their format and are converted again for each step.
        registers: maximum number of registers per thread; None leaves it to the compiler.

    """

    groups: int
    pixels: int
    warps: int
    stages: int = 2
    chunks: int = 1
    pieces: int = 1
    packed: bool = False
    registers: int | None = None


class GroupSize(NamedTuple):
    """Sizes and format that the choice of a configuration depends on."""

    samples: int
    groups: int
    group_channels: int
    pixels: int
    channels_last: bool
    element_bytes: int
    silu: bool = True


class GroupLimits(NamedTuple):
    """Limits of tile sizes for one kind of work.

    Attributes:
        kept: maximum number of elements of a tile that stays on the chip in fp32.
        packed: maximum number of elements of a tile that stays there in its 16-bit format.
        thread: number of elements per thread of a tile in that 16-bit format.
        walked: number of elements of a tile when a program loops over a group.

    """

    kept: int
    packed: int
    thread: int
    walked: int


LIMITS = {
    "forward": GroupLimits(8192, 16384, 64, 4096),
    "detached": GroupLimits(16384, 16384, 64, 4096),
    "full": GroupLimits(4096, 16384, 32, 2048),
}
# Registers a thread on Hopper, bf16, and the warps that a multiprocessor holds by them.
# Forward and detached: 48 to 72 at 16 elements to a thread (28 to 42 warps), 96 to 128 at 32 (16). Full: 128 (16).
# Packed tiles of 16384 spill up to 48 bytes a thread forward and 84 backward.
# Elements of a tile to a thread: few, or many, as sums over channels_last's pixels are the dearer the fewer they are.
FEW, MANY, FEW_UP_TO = 16, 32, 8192
# Two programs to a multiprocessor, one of which loads while the other one computes.
PACKED_REGISTERS = 128
# Without SiLU there is little to recompute, and packing pays from here on.
PACKED_FULL_FROM = 4096
# Neighbours that a thread reads together; fewer channels, since it holds their parameters and sums too.
PIXEL_BYTES, CHANNEL_BYTES = 16, 8
WALKED_WARP = 256
# Neighbouring channels: at least a DRAM sector, two if the tile stays small enough.
NARROW_BYTES, WIDE_BYTES = 32, 64
# If a thread's elements are neighbouring channels, it holds their parameters too, and needs more registers.
MAX_WARPS, MAX_WARPS_LAST = 32, 16
PROGRAMS, MAX_CHUNKS = 264, 64
LEAST_PIXELS, MOST_LANES = 8, 4096


def group_config(work: str, size: GroupSize) -> GroupConfig:
    """The launch for a size; work is `forward`, `detached` or `full`.

    Raises:
        ValueError: if a group has more channels than a tile has lanes.

    """
    if padded(size.group_channels) > MOST_LANES:
        raise ValueError(f"groups of {size.group_channels} channels, expected at most {MOST_LANES}: use `naive`")
    limits = LIMITS[work]
    wide, narrow = (_side_by_side(size, least) for least in (WIDE_BYTES, NARROW_BYTES))
    if work == "full" and not size.silu and size.element_bytes == 2 and _elements(size, narrow) >= PACKED_FULL_FROM:
        limits = limits._replace(kept=0)
    for groups in (wide, narrow):
        if (elements := _elements(size, groups)) <= limits.kept * 2 // size.element_bytes:
            many = elements > FEW_UP_TO or (size.channels_last and work != "full")
            return on_chip(size, groups, MANY if many else FEW)
    if size.element_bytes == 2 and _elements(size, narrow) <= limits.packed:
        return on_chip(size, narrow, limits.thread, packed=True)
    return _walked(limits, size, wide)


def _elements(size: GroupSize, groups: int) -> int:
    """Return the number of elements of a tile."""
    return groups * padded(size.group_channels) * size.pixels


def on_chip(size: GroupSize, groups: int, thread: int, packed: bool = False) -> GroupConfig:
    """A tile of whole groups, `thread` elements to a thread."""
    elements, lanes = _elements(size, groups), groups * padded(size.group_channels)
    warps = min(MAX_WARPS, padded(ceil_div(elements, 32 * thread)))
    together = (CHANNEL_BYTES if size.channels_last else PIXEL_BYTES) // size.element_bytes
    piece = min(padded(size.pixels), max(1, 32 * warps * together // lanes))
    pieces = ceil_div(size.pixels, piece)
    registers = PACKED_REGISTERS if packed else None
    return GroupConfig(groups, pieces * piece, warps, pieces=pieces, packed=packed, registers=registers)


def _walked(limits: GroupLimits, size: GroupSize, groups: int) -> GroupConfig:
    lanes = groups * padded(size.group_channels)
    pixels = min(padded(size.pixels), max(limits.walked // lanes, LEAST_PIXELS))
    programs = size.samples * ceil_div(size.groups, groups)
    chunks = min(MAX_CHUNKS, ceil_div(PROGRAMS, programs)) if programs < PROGRAMS // 2 else 1
    warps = max(1, min(pixels * lanes // WALKED_WARP, MAX_WARPS_LAST if size.channels_last else MAX_WARPS))
    return GroupConfig(groups, pixels, warps, chunks=chunks)


def _side_by_side(size: GroupSize, least_bytes: int) -> int:
    """Groups in a tile: in channels_last as many as make neighbouring channels worth reading."""
    if not size.channels_last:
        return 1
    wanted = least_bytes // (size.element_bytes * padded(size.group_channels))
    return max(1, min(wanted, padded(size.groups)))

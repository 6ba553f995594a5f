"""How the GroupNorm kernels are launched, by the work, the layout and the size of a group."""

from dataclasses import dataclass
from typing import NamedTuple

from fullstride.jvp.norms.launch import ceil_div, padded


@dataclass(frozen=True)
class GroupConfig:
    """A launch.

    Attributes:
        groups: side by side in a tile.
        pixels: of a tile; as many as a group has or more, and the group stays on the chip.
        warps: of a program.
        stages: tiles that a program has under way at once, where it walks.
        chunks: at most so many programs share a group's pixels.
        pieces: that a tile which stays on the chip is worked on in.
        packed: whether half-precision tensors wait there as they came, and are converted anew for each step.
        registers: at most so many a thread; None leaves that to the compiler.

    """

    groups: int
    pixels: int
    warps: int
    stages: int = 2
    chunks: int = 1
    pieces: int = 1
    packed: bool = False
    registers: int | None = None


class Size(NamedTuple):
    """What the choice depends on."""

    samples: int
    groups: int
    group_channels: int
    pixels: int
    channels_last: bool
    element_bytes: int


class Limits(NamedTuple):
    """Of one kind of work.

    Attributes:
        tile: most elements of a tile that stays on the chip.
        walked: elements of a tile that a program walks with.

    """

    tile: int
    walked: int


LIMITS = {"forward": Limits(16384, 4096), "detached": Limits(16384, 4096), "full": Limits(8192, 2048)}
# Elements of a tile that a warp holds, where the tile stays and where a program walks.
WARP, WALKED_WARP = 512, 256
# Channels that lie together: a DRAM sector at least, two where the pixels are walked anyway.
NARROW_BYTES, WIDE_BYTES = 32, 64
# Where a thread's elements are neighbouring channels, it holds their parameters too, and needs more registers.
MAX_WARPS, MAX_WARPS_LAST = 32, 16
PROGRAMS, MAX_CHUNKS = 264, 64
LEAST_PIXELS, MOST_LANES = 8, 4096


def group_config(work: str, size: Size) -> GroupConfig:
    """The launch for a size; work is `forward`, `detached` or `full`.

    Raises:
        ValueError: if a group has more channels than a tile has lanes.

    """
    limits, lanes = LIMITS[work], padded(size.group_channels)
    if lanes > MOST_LANES:
        raise ValueError(f"groups of {size.group_channels} channels, expected at most {MOST_LANES}: use `naive`")
    whole = padded(size.pixels)
    groups = _side_by_side(size, NARROW_BYTES)
    if whole * groups * lanes <= limits.tile:
        return GroupConfig(groups, whole, _warps(whole * groups * lanes // WARP, size))
    groups = _side_by_side(size, WIDE_BYTES)
    pixels = min(whole, max(limits.walked // (groups * lanes), LEAST_PIXELS))
    programs = size.samples * ceil_div(size.groups, groups)
    chunks = min(MAX_CHUNKS, ceil_div(PROGRAMS, programs)) if programs < PROGRAMS // 2 else 1
    return GroupConfig(groups, pixels, _warps(pixels * groups * lanes // WALKED_WARP, size), chunks=chunks)


def _side_by_side(size: Size, least_bytes: int) -> int:
    """Groups in a tile: in channels_last as many as make neighbouring channels worth reading."""
    if not size.channels_last:
        return 1
    wanted = least_bytes // (size.element_bytes * padded(size.group_channels))
    return max(1, min(wanted, padded(size.groups)))


def _warps(wanted: int, size: Size) -> int:
    return max(1, min(wanted, MAX_WARPS_LAST if size.channels_last else MAX_WARPS))

"""Launch configurations of the row kernels, by the work and the row's length."""

from dataclasses import dataclass

from fullstride.jvp.norms.launch import ceil_div, padded


@dataclass(frozen=True)
class RowConfig:
    """A launch.

    Attributes:
        width: number of columns of each piece of a row.
        rows: number of rows of a tile.
        warps: number of warps of a program.
        programs: maximum number of programs; each loops over its share of the rows.
        stages: number of tiles that a program has in flight.
        keep: whether a program keeps its parameters in registers; else it reloads them for every tile.

    """

    width: int
    rows: int
    warps: int
    programs: int
    stages: int = 1
    keep: bool = False


LONGEST = 16384
EVERY = 10**9
# Forward a row to a warp in pieces of 128 or 256 columns, and at most five of them; longer rows take more warps.
NARROWEST, WARP, MOST_PIECES = 128, 256, 5
# Backward by length, up to: a program of one or two warps waits for few, and has three tiles under way. Registers a
# thread on Hopper, bf16, and the warps that a multiprocessor holds by them: forward 80
# to 135 (24 to 12 warps); backward as noted. No spills but of 8 bytes in the adaptive forward at 384.
BACKWARD = {
    "detached": {
        640: RowConfig(128, 1, 1, 1056, 3, keep=True),  # 72 registers, 28 warps
        1024: RowConfig(256, 1, 1, 1056, 3, keep=True),  # 144 to 208, 14 to 9
        1280: RowConfig(256, 1, 2, 1056, 3, keep=True),  # 128, 16
    },
    "full": {
        640: RowConfig(128, 1, 1, 1056, 3, keep=True),  # 127, 16
        768: RowConfig(256, 1, 2, 1056, 3, keep=True),  # 127, 16
        1024: RowConfig(512, 1, 2, 792, 3, keep=True),  # 166, 12
        1280: RowConfig(256, 1, 4, 528),  # 118, 16
    },
    "modulated": {
        640: RowConfig(128, 1, 2, 1056, 3, keep=True),  # 96, 20
        1280: RowConfig(256, 1, 4, 396, 3, keep=True),  # 154, 12
    },
}


def row_config(work: str, length: int, modulated: bool = False) -> RowConfig:
    """The launch for rows of a length; work is `forward`, `detached` or `full`, `modulated` adaptive LayerNorm's.

    Raises:
        ValueError: if a row does not fit on the chip.

    """
    if length > LONGEST:
        raise ValueError(f"rows of {length} elements, expected at most {LONGEST}: use `naive`")
    if work == "forward":
        return _forward(length, modulated)
    table = BACKWARD["modulated" if modulated and work == "full" else work]
    for longest, config in table.items():
        if length <= longest:
            return config
    width = padded(length) // 4
    warps = max(4, width // 64)
    return RowConfig(width, 1, warps, 2112 // warps)


def _forward(length: int, modulated: bool) -> RowConfig:
    if modulated:
        if length <= MOST_PIECES * NARROWEST:
            return RowConfig(NARROWEST, 1, 1, 2112, 3, keep=True)
        if length <= MOST_PIECES * WARP:
            return RowConfig(WARP, 1, 4, 1056, 3, keep=True)
    width = NARROWEST
    while ceil_div(length, width) > MOST_PIECES:
        width *= 2
    warps = max(1, width // WARP)
    return RowConfig(width, max(1, warps * WARP // width), warps, EVERY)

"""How the row kernels are launched, by the work and the row's length."""

from dataclasses import dataclass

from fullstride.jvp.norms.launch import ceil_div


@dataclass(frozen=True)
class RowConfig:
    """A launch.

    Attributes:
        width: of the pieces that a row is cut into.
        rows: in a tile.
        warps: of a program.
        programs: at most so many; each walks through its share of the rows.
        stages: tiles that a program has under way at once.
        keep: whether a program keeps its parameters, or reads them anew for every tile.

    """

    width: int
    rows: int
    warps: int
    programs: int
    stages: int = 1
    keep: bool = False


# Registers a thread on Hopper, bf16, and the warps that a multiprocessor holds by them, at lengths of 384, 768, 1024
# and 1152 (`benchmarks/compile_norms.py`). Forward: 80, 80, 96, 128 (24 to 16 warps), adaptive 96 and 135 at 384 and
# 1152. Detached: 56, 56, 64, 72 (36 to 28). Full: 80, 72, 95, 118 (28 to 16), adaptive 96 and 128. No spills but of 8
# bytes in the adaptive forward at 384.
LONGEST = 16384
NARROWEST, WARP = 128, 256  # Columns: of a piece, and what a warp's lanes hold of a piece.
MOST_PIECES = 5
EVERY = 10**9


def row_config(work: str, length: int, modulated: bool = False) -> RowConfig:
    """The launch for rows of a length; work is `forward`, `detached` or `full`.

    Raises:
        ValueError: if a row does not fit on the chip.

    """
    if length > LONGEST:
        raise ValueError(f"rows of {length} elements, expected at most {LONGEST}: use `naive`")
    width = NARROWEST
    while ceil_div(length, width) > MOST_PIECES:
        width *= 2
    if work == "forward":
        warps = max(4, width // WARP)
        return RowConfig(width, warps * WARP // width, warps, 2048 if modulated else EVERY)
    warps = max(4, width // 64)
    return RowConfig(width, max(1, 256 // width), warps, 2112 // warps, 2)

"""How the row kernels are launched, by the work and the padded row length."""

from dataclasses import dataclass

from fullstride.jvp.norms.launch import padded


@dataclass(frozen=True)
class RowConfig:
    """A launch.

    Attributes:
        rows: in a tile.
        warps: of a program.
        programs: at most so many; each walks through its share of the rows.
        stages: tiles that a program has under way at once.

    """

    rows: int
    warps: int
    programs: int
    stages: int = 3


LONGEST = 16384
SHORTEST = 128

# By padded row length; a shorter row takes the first entry, with more rows to a tile.
FORWARD = {
    128: RowConfig(4, 1, 4224),
    256: RowConfig(2, 1, 4224),
    512: RowConfig(1, 1, 2112),
    1024: RowConfig(1, 2, 1056),
    2048: RowConfig(1, 4, 528),
    4096: RowConfig(1, 8, 264),
    8192: RowConfig(1, 16, 132, 2),
    16384: RowConfig(1, 32, 132, 1),
}
DETACHED = {
    128: RowConfig(4, 1, 2112),
    256: RowConfig(2, 1, 2112),
    512: RowConfig(1, 1, 2112),
    1024: RowConfig(1, 2, 1056),
    2048: RowConfig(1, 4, 528),
    4096: RowConfig(1, 8, 264),
    8192: RowConfig(1, 16, 132, 2),
    16384: RowConfig(1, 32, 132, 1),
}
FULL = {
    128: RowConfig(4, 1, 1584, 2),
    256: RowConfig(2, 1, 1584, 2),
    512: RowConfig(1, 2, 1056, 2),
    1024: RowConfig(1, 4, 528, 2),
    2048: RowConfig(1, 8, 264, 2),
    4096: RowConfig(1, 16, 132, 2),
    8192: RowConfig(1, 32, 132, 1),
    16384: RowConfig(1, 32, 132, 1),
}


def row_config(table: dict[int, RowConfig], length: int) -> RowConfig:
    """The table's entry for rows of a length.

    Raises:
        ValueError: if a row does not fit on the chip.

    """
    if length > LONGEST:
        raise ValueError(f"rows of {length} elements, expected at most {LONGEST}: use `naive`")
    return table[max(padded(length), SHORTEST)]

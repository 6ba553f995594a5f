"""Tile sizes of the backward kernels, by architecture, dtype and head dim; `benchmarks/tune_attention_backward.py`."""

from dataclasses import dataclass

import torch

from fullstride.jvp.attention.forward_table import width


@dataclass(frozen=True)
class Launch:
    """How one launch is cut into blocks.

    Attributes:
        of: the gradients that it makes, of "dq dtq" or of "dk dtk dv dtv". Fewer leave registers for larger blocks,
            but scores are made anew in each launch.
        block_m: queries a block.
        block_n: keys a block.
        warps: warps a block.
        stages: iterations whose loads are in flight.
        tma: whether rows are copied by the tensor memory accelerator, where the layout allows it; else by pointers.

    """

    of: str
    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False


# The launches, which together make each gradient once.
Config = tuple[Launch, ...]

# (bytes an element, columns of the wider of q and v up to, whether through the tangent): the configuration.
HOPPER: dict[tuple[int, int, bool], Config] = {
    (2, 64, True): (Launch("dq dtq", 128, 64, 8, 2), Launch("dk dtk dv dtv", 32, 128, 8, 2)),
    (2, 128, True): (
        Launch("dq dtq", 128, 32, 8, 3),
        Launch("dk dtk", 32, 128, 8, 2),
        Launch("dv dtv", 32, 128, 8, 2),
    ),
    (2, 256, True): (Launch("dq dtq", 64, 16, 4, 1), Launch("dk dtk", 16, 64, 4, 1), Launch("dv dtv", 16, 64, 4, 1)),
    (4, 256, True): (Launch("dq dtq", 16, 16, 4, 1), Launch("dk dtk", 16, 16, 4, 1), Launch("dv dtv", 16, 16, 4, 1)),
    (2, 128, False): (Launch("dq dtq", 128, 64, 8, 2), Launch("dk dtk dv dtv", 64, 128, 8, 2)),
    (2, 256, False): (Launch("dq dtq", 64, 32, 4, 1), Launch("dk dtk dv dtv", 32, 64, 8, 1)),
    (4, 256, False): (Launch("dq dtq", 16, 16, 4, 1), Launch("dk dtk dv dtv", 16, 16, 4, 1)),
}
# At most 99 KB of shared memory a block and no wgmma: what every GPU from sm_80 on has.
OTHER: dict[tuple[int, int, bool], Config] = {
    (2, 64, True): (Launch("dq dtq", 64, 32, 4, 1), Launch("dk dtk dv dtv", 32, 64, 4, 1)),
    (2, 128, True): (Launch("dq dtq", 64, 32, 8, 1), Launch("dk dtk", 32, 64, 8, 1), Launch("dv dtv", 32, 64, 8, 1)),
    (2, 256, True): (Launch("dq dtq", 16, 16, 4, 1), Launch("dk dtk", 16, 16, 4, 1), Launch("dv dtv", 16, 16, 4, 1)),
    (4, 256, True): (Launch("dq dtq", 16, 16, 4, 1), Launch("dk dtk", 16, 16, 4, 1), Launch("dv dtv", 16, 16, 4, 1)),
    (2, 256, False): (Launch("dq dtq", 64, 32, 4, 1), Launch("dk dtk dv dtv", 32, 64, 8, 1)),
    (4, 256, False): (Launch("dq dtq", 16, 16, 4, 1), Launch("dk dtk dv dtv", 16, 16, 4, 1)),
}


def pick(dtype: torch.dtype, d: int, dv: int, through: bool, capability: tuple[int, int]) -> Config:
    """The table's configuration; `through` where the tangent has a gradient."""
    table = HOPPER if capability[0] == 9 else OTHER
    columns, size = max(width(d), width(dv)), dtype.itemsize
    return next(table[key] for key in sorted(table) if key[0] == size and key[2] == through and columns <= key[1])

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


def pick(dtype: torch.dtype, d: int, dv: int, through: bool, capability: tuple[int, int]) -> Config:
    """The table's configuration; `through` where the tangent has a gradient."""
    return Launch("dq dtq", 64, 32, 4, 1), Launch("dk dtk dv dtv", 32, 64, 4, 1)

"""Tile sizes of the forward kernels, by architecture, dtype and head dim; `benchmarks/tuning/attention_forward.py`."""

from dataclasses import dataclass, replace

import torch

from fullstride.jvp.attention.tiles import pieces


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of a kernel.

    Attributes:
        block_m: number of queries per block.
        block_n: keys an iteration.
        warps: number of warps per block.
        stages: number of iterations whose loads are in flight.
        early: whether the products of the tangent of the scores are issued before the exponentials.
        tma: whether the tensor memory accelerator copies rows if the layout allows it; else pointers are used.

    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    early: bool = True
    tma: bool = False


@dataclass(frozen=True)
class SpecialisedConfig:
    """Tile sizes of Hopper's warp-specialised kernel, which has 128 queries per block.

    Attributes:
        block_n: keys an iteration.
        stages: number of blocks of keys and values in shared memory.
        turns: whether the two groups of warps take turns at the tensor cores.

    """

    block_n: int
    stages: int
    turns: bool = False


# Head dim: keys from which a configuration of the warp-specialised kernel is taken. 168 registers, no spills.
SPECIALISED = {
    64: {256: SpecialisedConfig(128, 2), 2048: SpecialisedConfig(128, 2, turns=True)},
    128: {256: SpecialisedConfig(64, 2)},
}

# Columns of the wider of q and v, up to: the configuration. 255 registers and no spills in bf16, unless noted.
SHORT = 1024
HOPPER = {
    "copied": {64: ForwardConfig(128, 128, 8, 3, tma=True), 128: ForwardConfig(128, 64, 8, 2, tma=True)},
    "short": {
        64: ForwardConfig(64, 32, 4, 2, tma=True),
        128: ForwardConfig(128, 64, 8, 2, tma=True),
    },  # 64: 128 registers
    "half": {
        64: ForwardConfig(64, 64, 4, 2),
        96: ForwardConfig(64, 64, 4, 2),
        128: ForwardConfig(128, 32, 8, 2),
        256: ForwardConfig(32, 32, 8, 2),
    },
    "tf32": {  # 96 and up spill
        64: ForwardConfig(64, 32, 4, 2),
        96: ForwardConfig(64, 32, 4, 1),
        128: ForwardConfig(64, 32, 8, 1),
        256: ForwardConfig(16, 16, 8, 1),
    },
    "ieee": {
        32: ForwardConfig(32, 32, 8, 1),
        64: ForwardConfig(32, 16, 8, 1),
        256: ForwardConfig(16, 16, 8, 1),
    },  # 256 spills
}
# At most 99 KB of shared memory a block and no wgmma: every GPU from sm_80 on supports it.
OTHER = {
    "half": {64: ForwardConfig(64, 32, 4, 2), 128: ForwardConfig(64, 32, 8, 1), 256: ForwardConfig(32, 16, 8, 1)},
    "tf32": {64: ForwardConfig(32, 32, 4, 1), 256: ForwardConfig(16, 16, 4, 1)},
    "ieee": HOPPER["ieee"],
}


def width(d: int) -> int:
    """Columns that a head dim takes in a kernel."""
    return sum(pieces(d)[1:])


def pick_specialised(d: int, keys: int) -> SpecialisedConfig | None:
    """Return the warp-specialised kernel's configuration; None if the other kernel is faster."""
    return next((c for least, c in sorted(SPECIALISED[d].items(), reverse=True) if least <= keys), None)


def pick(
    dtype: torch.dtype, d: int, dv: int, keys: int, capability: tuple[int, int], precision: str, tma: bool, masked: bool
) -> ForwardConfig:
    """The table's configuration; `tma` says whether the layout allows copies by the tensor memory accelerator.

    A mask's tiles take registers and shared memory too: half the keys then.
    """
    table = HOPPER if capability[0] == 9 else OTHER
    kind = "half" if dtype.itemsize == 2 else "ieee" if precision == "ieee" else "tf32"
    columns = max(width(d), width(dv))
    if kind == "half" and tma and columns <= 128 and "copied" in table:
        kind = "short" if keys < SHORT else "copied"
    config = next(config for most, config in sorted(table[kind].items()) if columns <= most)
    return replace(config, block_n=min(config.block_n, 32)) if masked else config

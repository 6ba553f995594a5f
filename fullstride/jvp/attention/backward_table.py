"""Tiles of the backward kernels, by architecture, dtype and head dim: `benchmarks/tuning/attention_backward.py`."""

from dataclasses import dataclass

import torch

from fullstride.jvp.attention.tiles import pieces


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes of one launch.

    Attributes:
        of: gradients of the launch, some of "dq dtq" or of "dk dtk dv dtv". Fewer leave registers for larger blocks,
            but each launch recomputes the scores.
        block_m: number of queries per block.
        block_n: number of keys per block.
        warps: number of warps per block.
        stages: number of iterations whose loads are in flight.
        tma: whether the tensor memory accelerator copies rows if the layout allows it; else pointers are used.
        parts: columns of which products of rows are summed, or 0 for whole rows at once. Operands of fp32 lie in
            registers, and whole rows overfill those; so do the rows of the widest heads.

    """

    of: str
    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    parts: int = 0


# The launches, which together make each gradient once.
Config = tuple[BackwardConfig, ...]

ALL_KEYS = "dk dtk dv dtv"

# (bytes an element, whether through the tangent): columns of the wider of q and v, up to: the configuration. Without
# spills in bf16, but for all of the keys' at 80 (34 bytes a thread), dk at 128 (2), dv at 128 (8), and at 256.
# A head dim with a tail, as 160 = 128 + 32, needs 16 rows a warp: Triton 3.6 makes wrong code where two groups of four
# warps share the columns of a tail.
HOPPER: dict[tuple[int, bool], dict[int, Config]] = {
    (2, True): {
        64: (BackwardConfig("dq dtq", 128, 64, 8, 3), BackwardConfig(ALL_KEYS, 32, 64, 4, 2, tma=True)),
        80: (BackwardConfig("dq dtq", 64, 32, 4, 3), BackwardConfig(ALL_KEYS, 32, 128, 8, 2)),
        96: (
            BackwardConfig("dq dtq", 64, 32, 4, 3),
            BackwardConfig("dk dtk", 32, 64, 4, 3),
            BackwardConfig("dv dtv", 64, 64, 4, 2),
        ),
        128: (
            BackwardConfig("dq dtq", 128, 32, 8, 3),
            BackwardConfig("dk dtk", 32, 128, 8, 3),
            BackwardConfig("dv dtv", 64, 128, 8, 2, tma=True),
        ),
        256: (
            BackwardConfig("dq dtq", 64, 32, 4, 1, parts=64),
            *(BackwardConfig(of, 32, 128, 8, 1, parts=64) for of in ("dk", "dtk", "dv", "dtv")),
        ),
    },
    (2, False): {
        64: (BackwardConfig("dq dtq", 64, 64, 4, 2, tma=True), BackwardConfig(ALL_KEYS, 32, 64, 4, 3)),
        128: (BackwardConfig("dq dtq", 64, 64, 4, 2, tma=True), BackwardConfig(ALL_KEYS, 64, 64, 4, 2, tma=True)),
        256: (
            BackwardConfig("dq dtq", 64, 32, 4, 1, parts=64),
            *(BackwardConfig(of, 32, 128, 8, 1, parts=64) for of in ("dk dtk", "dv dtv")),
        ),
    },
    (4, True): {
        64: tuple(BackwardConfig(of, 32, 32, 8, 1, parts=16) for of in ("dq dtq", "dk dtk", "dv dtv")),
        128: tuple(BackwardConfig(of, 32, 32, 8, 1, parts=16) for of in ("dq", "dtq", "dk dtk", "dv dtv")),
        256: tuple(BackwardConfig(of, 16, 16, 8, 1, parts=16) for of in ("dq dtq", ALL_KEYS)),
    },
    (4, False): {
        128: tuple(BackwardConfig(of, 32, 32, 8, 1, parts=16) for of in ("dq dtq", ALL_KEYS)),
        256: tuple(BackwardConfig(of, 16, 16, 8, 1, parts=16) for of in ("dq dtq", ALL_KEYS)),
    },
}
# At most 99 KB of shared memory a block and no wgmma: every GPU from sm_80 on supports it.
OTHER: dict[tuple[int, bool], dict[int, Config]] = {
    (2, True): {
        64: (
            BackwardConfig("dq dtq", 64, 32, 4, 1),
            BackwardConfig("dk dtk", 32, 64, 4, 1),
            BackwardConfig("dv dtv", 32, 64, 4, 1),
        ),
        256: tuple(BackwardConfig(of, 32, 32, 8, 1, parts=32) for of in ("dq", "dtq", "dk", "dtk", "dv", "dtv")),
    },
    (2, False): {
        64: (BackwardConfig("dq dtq", 64, 32, 4, 1), BackwardConfig(ALL_KEYS, 32, 64, 4, 1)),
        256: tuple(BackwardConfig(of, 32, 32, 8, 1, parts=32) for of in ("dq dtq", "dk dtk", "dv dtv")),
    },
    (4, True): HOPPER[4, True],
    (4, False): HOPPER[4, False],
}


def pick(dtype: torch.dtype, d: int, dv: int, through: bool, capability: tuple[int, int]) -> Config:
    """Return the table's configuration; `through` if the tangent has a gradient."""
    table = (HOPPER if capability[0] == 9 else OTHER)[dtype.itemsize, through]
    columns = max(sum(pieces(d)[1:]), sum(pieces(dv)[1:]))
    return next(config for most, config in sorted(table.items()) if columns <= most)

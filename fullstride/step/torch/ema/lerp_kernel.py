"""Several averages of many tensors in one kernel: each weight is read once, each average read and written once."""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
@no_type_check
def lerp_kernel(
    table, sizes, blocks, moved, COUNT: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, AVERAGED: tl.constexpr
):
    """A block of a tensor; `table` (tensors, 1 + COUNT) are addresses, `blocks` (blocks, 2) which tensor, and where.

    Weights are of the format TYPE, their averages of AVERAGED, in which the kernel computes.
    """
    which = tl.load(blocks + 2 * tl.program_id(0))
    at = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + which)
    row = table + which * (1 + COUNT)
    weight = tl.load(tl.load(row).to(tl.pointer_type(TYPE)) + at, mask=inside).to(AVERAGED)
    for i in tl.static_range(COUNT):
        place = tl.load(row + 1 + i).to(tl.pointer_type(AVERAGED)) + at
        average = tl.load(place, mask=inside)
        share = tl.load(moved + i).to(AVERAGED)
        tl.store(place, average + share * (weight - average), mask=inside)


class LerpTable:
    """Tables of addresses, made once: the tensors must stay where they are."""

    def __init__(self, weights: Sequence[Tensor], averages: Sequence[Sequence[Tensor]]):
        """Take tensors of any floating dtypes; averages lie as their weights do, in one format of 32 bits or more."""
        self._launches = []
        for dtype in {w.dtype for w in weights}:
            places = [i for i, w in enumerate(weights) if w.dtype == dtype and w.numel()]
            if not (groups := [(weights[i], *(own[i] for own in averages)) for i in places]):
                continue
            averaged = groups[0][-1].dtype
            for group in groups:
                _check(group, averaged)
            self._launches.append((_kind(dtype), _kind(averaged), *_tables(groups)))
        self._count = len(averages)
        self._kept_alive = list(weights), [list(own) for own in averages]

    def __call__(self, moved: Tensor) -> None:
        """Move each average the share `moved` (averages,), on the device, towards the weight."""
        kernel: Any = lerp_kernel
        for dtype, averaged, table, sizes, blocks in self._launches:
            options = {"COUNT": self._count, "BLOCK": BLOCK, "TYPE": dtype, "AVERAGED": averaged}
            kernel[(len(blocks),)](table, sizes, blocks, moved, **options)


def _kind(dtype: torch.dtype) -> Any:
    """Return Triton's name of a format."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def _check(group: tuple[Tensor, ...], averaged: torch.dtype) -> None:
    weight, *averages = group
    if any(x.stride() != weight.stride() for x in averages):
        raise ValueError(f"strides are {[x.stride() for x in group]}, expected the strides of the weight")
    if averaged.itemsize < 4 or any(x.dtype != averaged for x in averages):
        raise ValueError(
            f"averages of {weight.dtype} are {[x.dtype for x in averages]}, expected one format for all of these "
            "weights, of 32 bits or more"
        )


def _tables(groups: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    device = groups[0][0].device
    table = torch.tensor([[x.data_ptr() for x in group] for group in groups], dtype=torch.int64)
    sizes = torch.tensor([group[0].numel() for group in groups], dtype=torch.int64)
    blocks = [(i, block) for i, group in enumerate(groups) for block in range(triton.cdiv(group[0].numel(), BLOCK))]
    return table.to(device), sizes.to(device), torch.tensor(blocks, dtype=torch.int64).to(device)

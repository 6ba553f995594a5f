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
def lerp_kernel(table, sizes, blocks, moved, COUNT: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """A block of a tensor; `table` (tensors, 1 + COUNT) are addresses, `blocks` (blocks, 2) which tensor, and where."""
    which = tl.load(blocks + 2 * tl.program_id(0))
    at = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + which)
    row = table + which * (1 + COUNT)
    weight = tl.load(tl.load(row).to(tl.pointer_type(TYPE)) + at, mask=inside).to(tl.float32)
    for i in tl.static_range(COUNT):
        place = tl.load(row + 1 + i).to(tl.pointer_type(TYPE)) + at
        average = tl.load(place, mask=inside).to(tl.float32)
        share = tl.load(moved + i).to(tl.float32)
        tl.store(place, (average + share * (weight - average)).to(TYPE), mask=inside)


class ManyLerps:
    """Tables of addresses, made once: the tensors must stay where they are."""

    def __init__(self, weights: Sequence[Tensor], averages: Sequence[Sequence[Tensor]]):
        """Take tensors whose storage orders agree, of any floating dtypes.

        Raises:
            ValueError: if an average lies in another memory order than its weight.

        """
        self._launches = []
        for dtype in {w.dtype for w in weights}:
            places = [i for i, w in enumerate(weights) if w.dtype == dtype and w.numel()]
            groups = [(weights[i], *(own[i] for own in averages)) for i in places]
            for group in groups:
                _check(group)
            self._launches.append((getattr(tl, str(dtype).removeprefix("torch.")), *_tables(groups)))
        self._count = len(averages)
        self._kept_alive = list(weights), [list(own) for own in averages]

    def __call__(self, moved: Tensor) -> None:
        """Each average goes the share `moved` (averages,), on the device, of its way to the weight."""
        kernel: Any = lerp_kernel
        for dtype, table, sizes, blocks in self._launches:
            kernel[(len(blocks),)](table, sizes, blocks, moved, COUNT=self._count, BLOCK=BLOCK, TYPE=dtype)


def _check(group: tuple[Tensor, ...]) -> None:
    first = group[0]
    if any(x.stride() != first.stride() or x.dtype != first.dtype for x in group):
        raise ValueError(f"strides are {[x.stride() for x in group]}, expected an average to lie as its weight does")


def _tables(groups: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    device = groups[0][0].device
    table = torch.tensor([[x.data_ptr() for x in group] for group in groups], dtype=torch.int64)
    sizes = torch.tensor([group[0].numel() for group in groups], dtype=torch.int64)
    blocks = [(i, block) for i, group in enumerate(groups) for block in range(triton.cdiv(group[0].numel(), BLOCK))]
    return table.to(device), sizes.to(device), torch.tensor(blocks, dtype=torch.int64).to(device)

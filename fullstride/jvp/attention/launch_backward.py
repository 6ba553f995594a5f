"""Launches of the backward kernels, what they share worked out once."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from fullstride.device import triton_compile
from fullstride.jvp.attention.backward_keys import key_gradients
from fullstride.jvp.attention.backward_queries import query_gradients
from fullstride.jvp.attention.backward_table import Launch
from fullstride.jvp.attention.launch_common import (
    as_pointer,
    descriptor,
    strides_of,
    takes_tma,
    tiling,
)
from fullstride.jvp.attention.recompute import row_sums
from fullstride.jvp.attention.tiles import pieces

# Rows of a program of row_sums.
SUM_ROWS = 32


def launch_row_sums(go: Tensor, gto: Tensor | None, o: Tensor, to: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """rowsum(go o + gto to) and rowsum(gto o), laid out as lse; the latter is not written where gto is None."""
    delta, d2 = torch.empty_like(lse), torch.empty_like(lse)
    heads, length = lse.shape[-2:]
    blocks = triton.cdiv(length, SUM_ROWS)
    tensors = go, gto, o, None if gto is None else to
    if lse.numel():
        strides = tuple(map(strides_of, tensors))
        config = Launch("", SUM_ROWS, SUM_ROWS, warps=4, stages=3)
        constants = tiling(go, go, (*strides, None), config, (False, False), tma=False, edge=True, precision="ieee")
        arguments = tensors, (delta, d2), strides, (heads, length, blocks)
        triton_compile.launch(row_sums, (lse.numel() // length * blocks,), arguments, constants)
    return delta, d2


@dataclass(frozen=True)
class Call:
    """One call of `backward`.

    Attributes:
        tensors: q, k, v, tq, tk, tv, go and gto.
        rows: lse, mu, delta and d2.
        mask: of all scores, or None.
        packed: starts of the sequences' queries and keys, or None.
        batch: batch entries or sequences.
        heads: of queries and of keys.
        longest: queries and keys of the longest of them.
        scale: of the scores.
        band: how far a query sees to its left and right, and whether either side has a limit.
        precision: of fp32 products.

    """

    tensors: tuple[Any, ...]
    rows: tuple[Any, ...]
    mask: Tensor | None
    packed: tuple[Tensor, Tensor] | None
    batch: int
    heads: tuple[int, int]
    longest: tuple[int, int]
    scale: float
    band: tuple[tuple[int, int], tuple[bool, bool]]
    precision: str

    def launch(self, config: Launch, grads: dict[str, Any]) -> None:
        """Fill those of the gradients, by name, that the launch makes and that are not None."""
        queries = config.of.startswith(("dq", "dtq"))
        names = ("dq", "dtq") if queries else ("dk", "dv", "dtk", "dtv")
        chosen = tuple(grads[name] if name in config.of.split() else None for name in names)
        if all(x is None for x in chosen):
            return
        block, inner = (config.block_m, config.block_n) if queries else (config.block_n, config.block_m)
        longest, steps = self.longest if queries else self.longest[::-1]
        kernel, heads = (query_gradients, self.heads[0]) if queries else (key_gradients, self.heads[1])
        self._run(kernel, config, chosen, heads, -(-longest // block), steps % inner > 0)

    def _run(self, kernel: Any, config: Launch, grads: Any, heads: int, blocks: int, rest: bool) -> None:
        """Run a kernel on a grid of blocks of the heads; `rest` if its loop does not end with a whole block."""
        if self.batch * heads * blocks == 0:
            return
        q, k, v = self.tensors[:3]
        row = 2 if self.packed is None else 0
        limits, sides = self.band
        strides = tuple(map(strides_of, (*self.tensors, *grads, self.mask)))
        tma = config.tma and config.parts == 0 and takes_tma(self.tensors)
        # The tiles of a mask are loaded ahead too, and take the shared memory of a stage.
        config = config if self.mask is None else replace(config, stages=min(config.stages, 2))
        tiles = self._described(config) if tma else self.tensors
        mask = as_pointer(self.mask)
        group = self.heads[0] // max(1, self.heads[1])
        sizes = *limits, heads, group, q.shape[row], k.shape[row], blocks
        arguments = [*tiles, self.rows, mask, grads, self.packed, strides, self.scale, *sizes]
        edge = self.packed is not None or rest
        more: dict[str, Any] = {"tma": tma, "edge": edge, "precision": self.precision, "parts": config.parts}
        constants = tiling(q, v, strides, config, sides, **more)
        triton_compile.launch(kernel, (self.batch * heads * blocks,), arguments, constants)

    def _described(self, config: Launch) -> list[Any]:
        m, n = config.block_m, config.block_n
        d, dv = pieces(self.tensors[0].shape[-1])[1], pieces(self.tensors[2].shape[-1])[1]
        blocks = [(m, d), (n, d), (n, dv)] * 2 + [(m, dv)] * 2
        return [None if x is None else descriptor(x, *block) for x, block in zip(self.tensors, blocks, strict=True)]

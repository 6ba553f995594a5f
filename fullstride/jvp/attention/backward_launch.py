"""Launches of the backward kernels, what they share worked out once."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fullstride.jvp.attention.backward_keys import key_gradients
from fullstride.jvp.attention.backward_queries import query_gradients
from fullstride.jvp.attention.backward_table import Launch
from fullstride.jvp.attention.forward import WIDE_STRIDE, fits_tma, strides_of
from fullstride.jvp.attention.tiles import pieces
from fullstride.jvp.attention.weights import row_sums

# Rows of a program of row_sums.
SUM_ROWS = 64


def index_type(strides: Any) -> Any:
    """The integers that offsets within a tile need."""
    return tl.int64 if max(s for stride in strides if stride for s in stride) >= WIDE_STRIDE else tl.int32


def launch_row_sums(go: Tensor, gto: Tensor | None, o: Tensor, to: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """rowsum(go o + gto to) and rowsum(gto o), laid out as lse; the latter is not written where gto is None."""
    delta, d2 = torch.empty_like(lse), torch.empty_like(lse)
    heads, length = lse.shape[-2:]
    tensors = go, gto, o, None if gto is None else to
    strides = [strides_of(x) for x in tensors]
    blocks = triton.cdiv(length, SUM_ROWS)
    if lse.numel():
        sizes = heads, length, blocks, pieces(go.shape[-1]), SUM_ROWS, index_type(strides)
        row_sums[(lse.numel() // length * blocks,)](*tensors, delta, d2, *strides, *sizes, num_warps=4)
    return delta, d2


def describe(x: Tensor | None, rows: int) -> TensorDescriptor | None:
    """A tensor as the tensor memory accelerator reads blocks of its rows."""
    if x is None:
        return None
    strides = [s if n > 1 else 16 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, pieces(x.shape[3])[1]])


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
        band: how far a query sees to its left and right; negative is without limit.
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
    band: tuple[int, int]
    precision: str

    def launch(self, config: Launch, grads: dict[str, Any]) -> None:
        """Fill those of the gradients, by name, that the launch makes and that are not None."""
        queries = config.of.startswith(("dq", "dtq"))
        names = ("dq", "dtq") if queries else ("dk", "dv", "dtk", "dtv")
        chosen = [grads[name] if name in config.of.split() else None for name in names]
        if all(x is None for x in chosen):
            return
        block, inner = (config.block_m, config.block_n) if queries else (config.block_n, config.block_m)
        longest, steps = self.longest if queries else self.longest[::-1]
        kernel, heads = (query_gradients, self.heads[0]) if queries else (key_gradients, self.heads[1])
        self._run(kernel, config, chosen, heads, triton.cdiv(longest, block), steps % inner > 0)

    def _run(self, kernel: Any, config: Launch, grads: Any, heads: int, blocks: int, rest: bool) -> None:
        """Run a kernel on a grid of blocks of the heads; `rest` if its loop does not end with a whole block."""
        if self.batch * heads * blocks == 0:
            return
        q, k, v = self.tensors[:3]
        row = 2 if self.packed is None else 0
        left, right = self.band
        strides = [strides_of(x) for x in (*self.tensors, self.mask, *grads)]
        tma = config.tma and self.packed is None and not pieces(q.shape[-1])[2] and not pieces(v.shape[-1])[2]
        tma = tma and all(map(fits_tma, self.tensors))
        mask = self.mask.view(torch.uint8) if self.mask is not None and self.mask.dtype == torch.bool else self.mask
        kernel[(self.batch * heads * blocks,)](
            *(self._described(config) if tma else self.tensors),
            *self.rows,
            mask,
            *grads,
            *(self.packed or (None, None)),
            *strides,
            self.scale,
            min(max(left, 0), sum(self.longest)),
            min(max(right, 0), sum(self.longest)),
            heads,
            self.heads[0] // max(1, self.heads[1]),
            q.shape[row],
            k.shape[row],
            blocks,
            QK=pieces(q.shape[-1]),
            V=pieces(v.shape[-1]),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            TMA=tma,
            EDGE=self.packed is not None or rest,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            PRECISION=self.precision,
            INDEX=index_type(strides),
            num_warps=config.warps,
            num_stages=config.stages,
        )

    def _described(self, config: Launch) -> list[TensorDescriptor | None]:
        m, n = config.block_m, config.block_n
        return [describe(x, rows) for x, rows in zip(self.tensors, (m, n, n, m, n, n, m, m), strict=True)]

"""The dual norms over the last dimension as Triton kernels, with the signatures and the conventions of `naive`.

Tensors on one CUDA device (or any, in Triton's interpreter), x and tx of one format, rows of at most 16384 elements.
`config` replaces the launch that the tables hold.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fullstride.jvp.norms.closed_form import Affine, RowNorm
from fullstride.jvp.norms.launch import ceil_div, contiguous, launch, overlaps
from fullstride.jvp.norms.layout import row_major
from fullstride.jvp.norms.reduce_params import partial_sums, summed
from fullstride.jvp.norms.row_backward import backward_kernel
from fullstride.jvp.norms.row_configs import RowConfig, row_config
from fullstride.jvp.norms.row_forward import forward_kernel
from fullstride.jvp.norms.shapes import Gradients, Moments, Rows


def row_norm(
    norm: RowNorm,
    x: Rows,
    tx: Rows | None,
    affine: Affine,
    eps: float,
    dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> tuple[Rows, Rows | None, *Moments]:
    """See `naive.row_norm`; parameters of samples may be strided, as the parts of a `chunk` are."""
    x, tx = x.contiguous(), contiguous(tx)
    plan, n = _plan("forward", norm, x, config)
    y, rstd = row_major(x, dtype), torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    # A kernel without an output for the mean does not subtract it.
    mean = torch.empty_like(rstd) if norm.centred else None
    ty = None if all(t is None for t in (tx, affine.tweight, affine.tbias)) else row_major(y)
    parameters, steps = zip(*map(_strided, affine), strict=True)
    launch(
        forward_kernel, plan.grid, x, tx, *parameters, y, ty, mean, rstd, n, plan.chunks, plan.length, *steps, eps,
        norm.modulated, *plan.tile(x.shape[-1]), warps=plan.config.warps,
    )  # fmt: skip
    return (y, ty, rstd) if mean is None else (y, ty, mean, rstd)


def row_norm_backward(
    norm: RowNorm,
    gy: Rows,
    gty: Rows | None,
    x: Rows,
    tx: Rows | None,
    affine: Affine,
    moments: Moments,
    config: RowConfig | None = None,
) -> Gradients:
    """See `naive.row_norm_backward`."""
    if gty is None:
        tx, affine = None, Affine(affine.weight, affine.bias)
    gy, gty, x, tx = gy.contiguous(), contiguous(gty), x.contiguous(), contiguous(tx)
    plan, n = _plan("detached" if gty is None else "full", norm, x, config)
    dx, dtx = row_major(x), None if tx is None else row_major(tx)
    partial, asked = partial_sums(x, affine, plan.batches, plan.chunks)
    mean, rstd = moments if norm.centred else (None, *moments)
    (w, w_step), (tw, tw_step) = _strided(affine.weight), _strided(affine.tweight)
    launch(
        backward_kernel, plan.grid, gy, gty, x, tx, w, tw, mean, rstd, dx, dtx, partial,
        n, plan.chunks, plan.length, w_step, tw_step, norm.modulated, *asked, *plan.tile(x.shape[-1]),
        partial is not None and overlaps(x), warps=plan.config.warps,
    )  # fmt: skip
    return dx, dtx, *summed(partial, affine)


def _strided(parameter: Tensor | None) -> tuple[Tensor | None, int]:
    """A parameter whose rows are contiguous, and how far a batch's lies from the last one's."""
    if parameter is None:
        return None, 0
    if parameter.stride(-1) != 1:
        parameter = parameter.contiguous()
    return parameter, parameter.stride(0) if parameter.dim() > 1 else 0


class _Plan(NamedTuple):
    """A launch for one size: `chunks` programs for each of the batches that have parameters, of `length` rows each."""

    config: RowConfig
    batches: int
    chunks: int
    length: int

    @property
    def grid(self) -> tuple[int]:
        return (self.batches * self.chunks,)

    def tile(self, D: int) -> tuple[int, int, int, bool, int]:
        """ROWS, D, WIDTH, KEEP, STAGES."""
        config, one = self.config, self.length <= self.config.rows
        return config.rows, D, config.width, config.keep and not one, 1 if one else config.stages


def _plan(work: str, norm: RowNorm, x: Tensor, config: RowConfig | None) -> tuple[_Plan, int]:
    """The launch, and the rows of a batch."""
    batches = len(x) if norm.modulated else 1
    n, config = x[..., 0].numel() // max(batches, 1), config or row_config(work, x.shape[-1], norm.modulated)
    tiles, most = ceil_div(max(n, 1), config.rows), max(1, config.programs // max(batches, 1))
    length = ceil_div(tiles, most) * config.rows
    return _Plan(config, batches, ceil_div(max(n, 1), length), length), n

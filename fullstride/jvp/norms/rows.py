"""The dual norms over the last dimension as Triton kernels, with the signatures and the conventions of `naive`.

Tensors on one CUDA device (or any, in Triton's interpreter), x and tx of one format, rows of at most 16384 elements.
`config` replaces the launch that the tables hold.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fullstride.jvp.norms.launch import ceil_div, contiguous, launch, overlaps
from fullstride.jvp.norms.layout import row_major
from fullstride.jvp.norms.reduce_params import sum_partials
from fullstride.jvp.norms.row_backward import backward_kernel
from fullstride.jvp.norms.row_configs import RowConfig, row_config
from fullstride.jvp.norms.row_forward import forward_kernel
from fullstride.jvp.norms.shapes import Gradients, Modulation, Row, RowMoment, Rows, SampleMoment, Samples


class _Parameters(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    tweight: Tensor | None
    tbias: Tensor | None
    one_plus: bool = False


def layer_norm(
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    bias: Row | None,
    tweight: Row | None,
    tbias: Row | None,
    eps: float,
    dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> tuple[Rows, Rows | None, RowMoment, RowMoment]:
    """See `naive.layer_norm`."""
    mean = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    parameters = _Parameters(weight, bias, tweight, tbias)
    y, ty, rstd = _forward(x, tx, parameters, 1, mean, eps, dtype, config)
    return y, ty, mean, rstd


def layer_norm_backward(
    gy: Rows,
    gty: Rows | None,
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    bias: Row | None,
    tweight: Row | None,
    tbias: Row | None,
    mean: RowMoment,
    rstd: RowMoment,
    config: RowConfig | None = None,
) -> Gradients:
    """See `naive.layer_norm_backward`."""
    return _backward(gy, gty, x, tx, _Parameters(weight, bias, tweight, tbias), 1, mean, rstd, config)


def rms_norm(
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    tweight: Row | None,
    eps: float,
    dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> tuple[Rows, Rows | None, RowMoment]:
    """See `naive.rms_norm`."""
    return _forward(x, tx, _Parameters(weight, None, tweight, None), 1, None, eps, dtype, config)


def rms_norm_backward(
    gy: Rows,
    gty: Rows | None,
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    tweight: Row | None,
    rstd: RowMoment,
    config: RowConfig | None = None,
) -> Gradients:
    """See `naive.rms_norm_backward`."""
    parameters = _Parameters(weight, None, tweight, None)
    dx, dtx, dweight, _, dtweight, _ = _backward(gy, gty, x, tx, parameters, 1, None, rstd, config)
    return dx, dtx, dweight, dtweight


def ada_layer_norm(
    x: Samples,
    tx: Samples | None,
    scale: Modulation,
    shift: Modulation,
    tscale: Modulation | None,
    tshift: Modulation | None,
    eps: float,
    dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> tuple[Samples, Samples | None, SampleMoment, SampleMoment]:
    """See `naive.ada_layer_norm`; scale and shift may be strided, as the parts of a `chunk` are."""
    mean = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    parameters = _Parameters(scale, shift, tscale, tshift, one_plus=True)
    y, ty, rstd = _forward(x, tx, parameters, len(x), mean, eps, dtype, config)
    return y, ty, mean, rstd


def ada_layer_norm_backward(
    gy: Samples,
    gty: Samples | None,
    x: Samples,
    tx: Samples | None,
    scale: Modulation,
    shift: Modulation,
    tscale: Modulation | None,
    tshift: Modulation | None,
    mean: SampleMoment,
    rstd: SampleMoment,
    config: RowConfig | None = None,
) -> Gradients:
    """See `naive.ada_layer_norm_backward`."""
    parameters = _Parameters(scale, shift, tscale, tshift, one_plus=True)
    return _backward(gy, gty, x, tx, parameters, len(x), mean, rstd, config)


def _forward(
    x: Tensor,
    tx: Tensor | None,
    parameters: _Parameters,
    batches: int,
    mean: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    config: RowConfig | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, ty and rstd; fills `mean`, whose absence makes it an RMSNorm."""
    x, tx = x.contiguous(), contiguous(tx)
    n, D = x[..., 0].numel() // max(batches, 1), x.shape[-1]
    plan = _plan(config or row_config("forward", D, parameters.one_plus), batches, n)
    y, rstd = row_major(x, dtype), torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    tangents = (tx, parameters.tweight, parameters.tbias)
    ty = None if all(t is None for t in tangents) else row_major(y)
    (w, w_step), (b, b_step), (tw, tw_step), (tb, tb_step) = (_strided(p) for p in parameters[:4])
    launch(
        forward_kernel, (batches * plan.chunks,), x, tx, w, b, tw, tb, y, ty, mean, rstd,
        n, plan.chunks, plan.length, w_step, b_step, tw_step, tb_step, eps,
        parameters.one_plus, *plan.tile(D), warps=plan.config.warps,
    )  # fmt: skip
    return y, ty, rstd


def _backward(
    gy: Tensor,
    gty: Tensor | None,
    x: Tensor,
    tx: Tensor | None,
    parameters: _Parameters,
    batches: int,
    mean: Tensor | None,
    rstd: Tensor,
    config: RowConfig | None,
) -> Gradients:
    if gty is None:
        tx, parameters = None, parameters._replace(tweight=None, tbias=None)
    gy, gty, x, tx = gy.contiguous(), contiguous(gty), x.contiguous(), contiguous(tx)
    n, D = x[..., 0].numel() // max(batches, 1), x.shape[-1]
    work = "detached" if gty is None else "full"
    plan = _plan(config or row_config(work, D, parameters.one_plus), batches, n)
    asked = [p is not None for p in parameters[:4]]
    dx, dtx = row_major(x), None if tx is None else row_major(tx)
    size = (batches, plan.chunks, sum(asked), D)
    partial = torch.empty(size, device=x.device, dtype=torch.float32) if any(asked) else None
    (w, w_step), (tw, tw_step) = _strided(parameters.weight), _strided(parameters.tweight)
    launch(
        backward_kernel, (batches * plan.chunks,), gy, gty, x, tx, w, tw, mean, rstd, dx, dtx, partial,
        n, plan.chunks, plan.length, w_step, tw_step,
        parameters.one_plus, *asked, *plan.tile(D), partial is not None and overlaps(x), warps=plan.config.warps,
    )  # fmt: skip
    found = iter([] if partial is None else sum_partials(partial, [p for p in parameters[:4] if p is not None]))
    return (dx, dtx, *(next(found) if a else None for a in asked))


def _strided(parameter: Tensor | None) -> tuple[Tensor | None, int]:
    """A parameter whose rows are contiguous, and how far a batch's lies from the last one's."""
    if parameter is None:
        return None, 0
    if parameter.stride(-1) != 1:
        parameter = parameter.contiguous()
    return parameter, parameter.stride(0) if parameter.dim() > 1 else 0


class _Plan(NamedTuple):
    """A launch for one size: `chunks` programs a batch, of `length` rows each."""

    config: RowConfig
    chunks: int
    length: int

    def tile(self, D: int) -> tuple[int, int, int, bool, int]:
        """ROWS, D, WIDTH, KEEP, STAGES."""
        config, one = self.config, self.length <= self.config.rows
        return config.rows, D, config.width, config.keep and not one, 1 if one else config.stages


def _plan(config: RowConfig, batches: int, n: int) -> _Plan:
    tiles, most = ceil_div(max(n, 1), config.rows), max(1, config.programs // max(batches, 1))
    length = ceil_div(tiles, most) * config.rows
    return _Plan(config, ceil_div(max(n, 1), length), length)

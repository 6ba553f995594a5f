"""The dual GroupNorm as Triton kernels, with the signatures and the conventions of `naive`.

Tensors on one CUDA device (or any, in Triton's interpreter), x and tx of one format, samples of less than 2^31
elements. channels_last (2d and 3d) is worked on as it lies, any other layout row-major. `config` replaces the launch
that `group_configs` chooses.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullstride.jvp.norms import group_onepass_backward, group_onepass_forward, naive
from fullstride.jvp.norms.closed_form import Affine
from fullstride.jvp.norms.group_configs import GroupConfig, Size, group_config
from fullstride.jvp.norms.group_split import apply_kernel, gradients_kernel, moments_kernel, sums_kernel
from fullstride.jvp.norms.group_twopass_backward import backward_kernel
from fullstride.jvp.norms.group_twopass_forward import forward_kernel
from fullstride.jvp.norms.launch import ceil_div, launch, overlaps, padded
from fullstride.jvp.norms.layout import format_of, images_like
from fullstride.jvp.norms.reduce_params import partial_sums, summed
from fullstride.jvp.norms.shapes import First, Gradients, GroupMoment, Image, Moments

LONGEST = 2**31


class _Plan(NamedTuple):
    """A launch for one size: `blocks` programs a sample, or as many for each of the chunks of `length` pixels."""

    size: Size
    config: GroupConfig
    blocks: int
    chunks: int
    length: int

    @property
    def grid(self) -> tuple[int]:
        return (self.size.samples * self.blocks * self.chunks,)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Groups, channels, pixels."""
        return self.size.groups, self.size.groups * self.size.group_channels, self.size.pixels

    @property
    def tile(self) -> tuple[int, int, int, int, bool]:
        """CPG, PAD, GROUPS, PIXELS, LAST."""
        channels, config = self.size.group_channels, self.config
        return channels, padded(channels), config.groups, config.pixels, self.size.channels_last

    @property
    def on_chip(self) -> bool:
        """Whether a program holds whole groups."""
        return self.chunks == 1 and self.config.pixels >= self.size.pixels

    @property
    def chip_tile(self) -> tuple[int, int, int, int, int, bool, bool, bool]:
        """CPG, PAD, GROUPS, PIECES, PIECE, LAST, EXACT, PACKED."""
        channels, pad, groups, pixels, last = self.tile
        exact = channels == pad and self.size.groups % groups == 0 and self.size.pixels == pixels
        return channels, pad, groups, self.config.pieces, pixels // self.config.pieces, last, exact, self.config.packed

    @property
    def options(self) -> dict[str, Any]:
        """Of the launch."""
        return {"warps": self.config.warps, "registers": self.config.registers}


def group_norm(
    x: Image,
    tx: First | None,
    groups: int,
    affine: Affine,
    eps: float,
    act: str | None = None,
    dtype: torch.dtype | None = None,
    config: GroupConfig | None = None,
) -> tuple[Image, First | None, GroupMoment, GroupMoment]:
    """See `naive.group_norm`; a tx of fewer samples than x is that of the first ones, which alone have a ty then."""
    if x.numel() == 0:
        return naive.group_norm(x, tx, groups, affine, eps, act, dtype)
    silu, layout = _silu(act), format_of(x)
    x, tx = _laid(x, layout), _maybe_laid(tx, layout)
    plan = _plan("forward", x, groups, silu, config)
    moving = None if tx is None or len(tx) == len(x) else len(tx)
    if moving is not None and not plan.on_chip:
        y, _, mean, rstd = group_norm(x, None, groups, affine, eps, act, dtype)
        _, ty, *_ = group_norm(x[:moving], tx, groups, affine, eps, act, dtype)
        return y, ty, mean, rstd
    y = images_like(x, dtype)
    ty = None if all(t is None for t in (tx, affine.tweight, affine.tbias)) else images_like(x[:moving], dtype)
    mean, rstd = (torch.empty((len(x), groups), device=x.device, dtype=torch.float32) for _ in range(2))
    tensors = (x, tx, *affine, y, ty, mean, rstd)
    stages = plan.config.stages
    if plan.on_chip:
        rest = (moving, plan.blocks, *plan.sizes, eps, *plan.chip_tile, silu)
        launch(group_onepass_forward.forward_kernel, plan.grid, *tensors, *rest, **plan.options)
    elif plan.chunks == 1:
        rest = (plan.blocks, *plan.sizes, eps, *plan.tile, silu, stages)
        launch(forward_kernel, plan.grid, *tensors, *rest, **plan.options)
    else:
        moments = _moments(x, tx, plan)
        rest = (len(x), plan.blocks, plan.chunks, plan.length, *plan.sizes, eps, *plan.tile, silu)
        launch(apply_kernel, plan.grid, *tensors, moments, *rest, padded(plan.chunks), stages, **plan.options)
    return y, ty, mean, rstd


def group_norm_backward(
    gy: Image,
    gty: Image | None,
    x: Image,
    tx: Image | None,
    groups: int,
    affine: Affine,
    moments: Moments,
    act: str | None = None,
    config: GroupConfig | None = None,
) -> Gradients:
    """See `naive.group_norm_backward`."""
    if gty is None:
        tx, affine = None, Affine(affine.weight, affine.bias)
    if x.numel() == 0:
        return naive.group_norm_backward(gy, gty, x, tx, groups, affine, moments, act)
    silu, layout = _silu(act), format_of(x)
    gy, gty, x, tx = _laid(gy, layout), _maybe_laid(gty, layout), _laid(x, layout), _maybe_laid(tx, layout)
    plan = _plan("detached" if gty is None else "full", x, groups, silu, config)
    dx, dtx = images_like(x), None if tx is None else images_like(x)
    partial, asked = partial_sums(x, affine, 1, len(x) * plan.chunks)
    inputs = (gy, gty, x, tx, *affine, *moments)
    if plan.on_chip:
        rest = (plan.blocks, *plan.sizes, *asked, *plan.chip_tile, silu, partial is not None and overlaps(x))
        launch(group_onepass_backward.backward_kernel, plan.grid, *inputs, dx, dtx, partial, *rest, **plan.options)
    elif plan.chunks == 1:
        rest = (plan.blocks, *plan.sizes, *asked, *plan.tile, silu, plan.config.stages)
        launch(backward_kernel, plan.grid, *inputs, dx, dtx, partial, *rest, **plan.options)
    else:
        _split_backward(inputs, dx, dtx, partial, plan, asked, silu)
    return dx, dtx, *summed(partial, affine)


def _split_backward(
    inputs: tuple[Tensor | None, ...],
    dx: Tensor,
    dtx: Tensor | None,
    partial: Tensor | None,
    plan: _Plan,
    asked: list[bool],
    silu: bool,
) -> None:
    x, tx = inputs[2], inputs[3]
    assert x is not None
    moments = None if tx is None else _moments(x, tx, plan)
    sums = torch.empty((len(x), plan.chunks, 5, x.shape[1]), device=x.device, dtype=torch.float32)
    sizes = (len(x), plan.blocks, plan.chunks, plan.length, *plan.sizes)
    tile = (*plan.tile, silu, padded(plan.chunks), plan.config.stages)
    launch(sums_kernel, plan.grid, *inputs, moments, sums, partial, *sizes, *asked, *tile, **plan.options)
    launch(gradients_kernel, plan.grid, *inputs, moments, sums, dx, dtx, *sizes, *tile, **plan.options)


def _moments(x: Tensor, tx: Tensor | None, plan: _Plan) -> Tensor:
    """The moments of each chunk of each group: (4, samples, chunks, groups)."""
    moments = torch.empty((4, len(x), plan.chunks, plan.size.groups), device=x.device, dtype=torch.float32)
    sizes = (plan.blocks, plan.chunks, plan.length, *plan.sizes)
    launch(moments_kernel, plan.grid, x, tx, moments, *sizes, *plan.tile, plan.config.stages, **plan.options)
    return moments


def _plan(work: str, x: Tensor, groups: int, silu: bool, config: GroupConfig | None) -> _Plan:
    samples, channels, pixels = len(x), x.shape[1], x[:1, :1].numel()
    if channels * pixels >= LONGEST:
        raise ValueError(f"samples of {channels * pixels} elements, expected less than 2^31: use `naive`")
    last = pixels == 1 or not x.is_contiguous()
    size = Size(samples, groups, channels // groups, pixels, last, x.element_size(), silu)
    config = config or group_config(work, size)
    length = ceil_div(ceil_div(pixels, config.chunks), config.pixels) * config.pixels
    return _Plan(size, config, ceil_div(groups, config.groups), ceil_div(pixels, length), length)


def _laid(a: Tensor, layout: torch.memory_format) -> Tensor:
    return a.contiguous(memory_format=layout)


def _maybe_laid(a: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    return None if a is None else _laid(a, layout)


def _silu(act: str | None) -> bool:
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")
    return act == "silu"

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
from fullstride.jvp.norms.group_configs import GroupConfig, GroupSize, group_config
from fullstride.jvp.norms.group_split import apply_kernel, gradients_kernel, moments_kernel, sums_kernel
from fullstride.jvp.norms.group_tiles import GroupTile
from fullstride.jvp.norms.group_twopass_backward import backward_kernel
from fullstride.jvp.norms.group_twopass_forward import forward_kernel
from fullstride.jvp.norms.launch import ceil_div, contiguous, launch, overlaps, padded
from fullstride.jvp.norms.layout import format_of, images_like, over_pixels
from fullstride.jvp.norms.naive import UNMOVED, Shifts
from fullstride.jvp.norms.reduce_params import partial_sums, summed
from fullstride.jvp.norms.shapes import First, Gradients, GroupMoment, Image, Moments

LONGEST = 2**31


class _Plan(NamedTuple):
    """A launch for one size: `blocks` programs a sample, or as many for each of the chunks of `length` pixels."""

    size: GroupSize
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
    def tile(self) -> GroupTile:
        """The kernels' constants."""
        size, config = self.size, self.config
        channels, pixels, pieces = size.group_channels, config.pixels, config.pieces if self.on_chip else 1
        exact = channels == padded(channels) and size.groups % config.groups == 0 and size.pixels == pixels
        return GroupTile(
            cpg=channels,
            pad=padded(channels),
            groups=config.groups,
            pixels=pixels // pieces,
            last=size.channels_last,
            silu=size.silu,
            stages=config.stages,
            chunks=padded(self.chunks),
            pieces=pieces,
            exact=exact and self.on_chip,
            packed=config.packed and self.on_chip,
        )

    @property
    def on_chip(self) -> bool:
        """Return whether a program holds whole groups."""
        return self.chunks == 1 and self.config.pixels >= self.size.pixels

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Samples, blocks of groups, chunks and a chunk's pixels."""
        return self.size.samples, self.blocks, self.chunks, self.length

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the launch."""
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
    shifts: Shifts = UNMOVED,
) -> tuple[Image, First | None, GroupMoment, GroupMoment]:
    """See `naive.group_norm`; a tx of fewer samples than x is that of the first ones, which alone have a ty then."""
    if x.numel() == 0:
        return naive.group_norm(x, tx, groups, affine, eps, act, dtype, shifts)
    silu, layout, affine = _silu(act), format_of(x), Affine(*map(contiguous, affine))
    x, tx = _laid(x, layout), _maybe_laid(tx, layout)
    plan = _plan("forward", x, groups, silu, config)
    shift, tshift = map(contiguous, shifts)
    if not plan.on_chip:
        x, tx = _moved(x, shift), tx if tx is None else _moved(tx, tshift)
    moving = None if tx is None or len(tx) == len(x) else len(tx)
    if moving is not None and not plan.on_chip:
        y, _, mean, rstd = group_norm(x, None, groups, affine, eps, act, dtype)
        _, ty, *_ = group_norm(x[:moving], tx, groups, affine, eps, act, dtype)
        return y, ty, mean, rstd
    y = images_like(x, dtype)
    ty = None if all(t is None for t in (tx, affine.tweight, affine.tbias)) else images_like(x[:moving], dtype)
    mean, rstd = (torch.empty((len(x), groups), device=x.device, dtype=torch.float32) for _ in range(2))
    tensors = (x, tx), tuple(affine), (y, ty), (mean, rstd)
    rest = plan.sizes, eps, plan.tile
    if plan.on_chip:
        rest = moving, (shift, tshift), plan.blocks, *rest
        launch(group_onepass_forward.forward_kernel, plan.grid, *tensors, *rest, **plan.options)
    elif plan.chunks == 1:
        launch(forward_kernel, plan.grid, *tensors, plan.blocks, *rest, **plan.options)
    else:
        launch(apply_kernel, plan.grid, *tensors, _moments(x, tx, plan), plan.shape, *rest, **plan.options)
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
    shifts: Shifts = UNMOVED,
) -> Gradients:
    """See `naive.group_norm_backward`."""
    shift, tshift = map(contiguous, shifts)
    if gty is None:
        tx, tshift, affine = None, None, Affine(affine.weight, affine.bias)
    if x.numel() == 0:
        return naive.group_norm_backward(gy, gty, x, tx, groups, affine, moments, act, (shift, tshift))
    silu, layout, affine = _silu(act), format_of(x), Affine(*map(contiguous, affine))
    gy, gty, x, tx = _laid(gy, layout), _maybe_laid(gty, layout), _laid(x, layout), _maybe_laid(tx, layout)
    plan = _plan("detached" if gty is None else "full", x, groups, silu, config)
    if not plan.on_chip:
        x, tx = _moved(x, shift), tx if tx is None else _moved(tx, tshift)
    dx, dtx = images_like(x), None if tx is None else images_like(x)
    dshifts = tuple(None if s is None else torch.empty_like(s) for s in (shift, tshift))
    partial, asked = partial_sums(x, affine, 1, len(x) * plan.chunks)
    tensors = (gy, gty, x, tx), tuple(affine), tuple(moments)
    rest = plan.sizes, tuple(asked), plan.tile
    if plan.on_chip:
        early = partial is not None and overlaps(x)
        arguments = *tensors, (shift, tshift), (dx, dtx, *dshifts), partial, plan.blocks, *rest, early
        launch(group_onepass_backward.backward_kernel, plan.grid, *arguments, **plan.options)
    elif plan.chunks == 1:
        launch(backward_kernel, plan.grid, *tensors, (dx, dtx), partial, plan.blocks, *rest, **plan.options)
    else:
        found = None if tx is None else _moments(x, tx, plan)
        sums = torch.empty((len(x), plan.chunks, 5, x.shape[1]), device=x.device, dtype=torch.float32)
        launch(sums_kernel, plan.grid, *tensors, found, sums, partial, plan.shape, *rest, **plan.options)
        rest = plan.shape, plan.sizes, plan.tile
        launch(gradients_kernel, plan.grid, *tensors, found, sums, (dx, dtx), *rest, **plan.options)
    if not plan.on_chip:
        dshifts = (naive.summed_over_pixels(d, s) for d, s in zip((dx, dtx), (shift, tshift), strict=True))
    return dx, dtx, *summed(partial, affine), *dshifts


def _moments(x: Tensor, tx: Tensor | None, plan: _Plan) -> Tensor:
    """The moments of each chunk of each group: (4, samples, chunks, groups)."""
    moments = torch.empty((4, len(x), plan.chunks, plan.size.groups), device=x.device, dtype=torch.float32)
    tile = plan.tile._replace(silu=False, chunks=1)  # one kernel for all
    launch(moments_kernel, plan.grid, (x, tx), moments, plan.shape, plan.sizes, tile, **plan.options)
    return moments


def _plan(work: str, x: Tensor, groups: int, silu: bool, config: GroupConfig | None) -> _Plan:
    samples, channels, pixels = len(x), x.shape[1], x[:1, :1].numel()
    if channels * pixels >= LONGEST:
        raise ValueError(f"samples of {channels * pixels} elements, expected less than 2^31: use `naive`")
    last = pixels == 1 or not x.is_contiguous()
    size = GroupSize(samples, groups, channels // groups, pixels, last, x.element_size(), silu)
    config = config or group_config(work, size)
    length = ceil_div(ceil_div(pixels, config.chunks), config.pixels) * config.pixels
    return _Plan(size, config, ceil_div(groups, config.groups), ceil_div(pixels, length), length)


def _moved(x: Tensor, shift: Tensor | None) -> Tensor:
    """x with a shift of each channel of each sample, for kernels that have none of their own."""
    return x if shift is None else (x + over_pixels(shift, x)).to(x.dtype)


def _laid(a: Tensor, layout: torch.memory_format) -> Tensor:
    return a.contiguous(memory_format=layout)


def _maybe_laid(a: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    return None if a is None else _laid(a, layout)


def _silu(act: str | None) -> bool:
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")
    return act == "silu"

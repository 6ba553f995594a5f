"""Tiles of a sample's pixels and of the channels of whole groups, the parts that the GroupNorm kernels are made of.

A tile is [pixels, lanes]: GROUPS groups lie side by side in the lanes, each padded from CPG channels to PAD of them.
Sums over the pixels leave one value a lane; `over_groups` then adds a group's lanes. A value of a group is a scalar
if there is one group, else it stands [1, lanes] in each lane of its group: both broadcast against a tile.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl


class GroupTile(NamedTuple):
    """The constants of a GroupNorm kernel.

    Attributes:
        cpg: number of channels of a group.
        pad: that number padded to a power of two.
        groups: number of groups side by side in a tile.
        pixels: number of pixels of a tile, or of one of its pieces.
        last: whether the images are channels_last.
        silu: whether SiLU follows.
        stages: number of tiles that a program has in flight.
        chunks: a power of two, at least the number of chunks that share a group's pixels.
        pieces: number of pieces of a tile that stays on the chip.
        exact: whether every place of every tile holds an element.
        packed: whether 16-bit tiles stay in their format.

    """

    cpg: int
    pad: int
    groups: int
    pixels: int
    last: bool
    silu: bool
    stages: int = 1
    chunks: int = 1
    pieces: int = 1
    exact: bool = False
    packed: bool = False


@triton.jit
@no_type_check
def lanes(block, groups, T: tl.constexpr):
    """Return for each lane, [1, lanes]: channel, group, whether it holds a channel, whether it is its group's first."""
    lane = tl.arange(0, T.groups * T.pad)[None, :]
    group = block * T.groups + lane // T.pad
    if T.cpg == T.pad:  # This form shows the compiler that they are neighbours, so that it vectorises the loads.
        channel = block * T.groups * T.pad + lane
        there = channel < groups * T.cpg
    else:
        channel = group * T.cpg + lane % T.pad
        there = (lane % T.pad < T.cpg) & (group < groups)
    return channel, group, there, (lane % T.pad == 0) & (group < groups)


@triton.jit
@no_type_check
def positions(pixel, channel, sizes, T: tl.constexpr):
    """Return a tile's position in its sample: pixels [*, 1], channels [1, *]."""
    return pixel * sizes[1] + channel if T.last else channel * sizes[2] + pixel


@triton.jit
@no_type_check
def fetch(at, inside):
    """A tile in fp32, zero outside."""
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
@no_type_check
def parameter(at, lane, ABSENT: tl.constexpr):
    """A parameter of each lane in fp32, or the value that its absence stands for."""
    value = tl.full(lane[0].shape, ABSENT, tl.float32)
    if at is not None:
        value = tl.load(at + lane[0], mask=lane[2], other=0).to(tl.float32)
    return value


@triton.jit
@no_type_check
def parameters(affine, lane):
    """Weight, bias and their tangents of each lane."""
    w, b = parameter(affine[0], lane, 1), parameter(affine[1], lane, 0)
    return w, b, parameter(affine[2], lane, 0), parameter(affine[3], lane, 0)


@triton.jit
@no_type_check
def shift_of(at, sample, channels, lane, MOVES=None):
    """The shift of each lane's channel of a sample, from (samples, channels); nothing without MOVES."""
    there = lane[2] if MOVES is None else lane[2] & MOVES
    return tl.load(at + sample.to(tl.int64) * channels + lane[0], mask=there, other=0).to(tl.float32)


@triton.jit
@no_type_check
def over_pixels(tile):
    """Sums over the pixels, one a lane."""
    return tl.sum(tile, axis=0)[None, :]


@triton.jit
@no_type_check
def over_groups(lane_sums, T: tl.constexpr):
    """Sums over a group's lanes."""
    if T.groups == 1:
        sums = tl.sum(lane_sums)
    else:
        sums = tl.sum(tl.reshape(lane_sums, (T.groups, T.pad)), axis=1)
        sums = tl.reshape(tl.broadcast_to(sums[:, None], (T.groups, T.pad)), (1, T.groups * T.pad))
    return sums


@triton.jit
@no_type_check
def total(tile, T: tl.constexpr):
    """Sums over a group's pixels and lanes."""
    return tl.sum(tile) if T.groups == 1 else over_groups(over_pixels(tile), T)


@triton.jit
@no_type_check
def group_value(at, sample, block, lane, groups, T: tl.constexpr):
    """A value of each group, from (samples, groups)."""
    at += sample * groups
    return tl.load(at + block) if T.groups == 1 else tl.load(at + lane[1], mask=lane[2], other=0)


@triton.jit
@no_type_check
def keep_group_value(at, value, sample, lane, groups):
    """The inverse of `group_value`."""
    tl.store(at + sample * groups + lane[1], value + tl.zeros(lane[1].shape, tl.float32), mask=lane[3])


@triton.jit
@no_type_check
def keep_partials(PARTIAL, row, lane, channels, gradients, ASKED: tl.constexpr):
    """Store a row's shares of those of dw, db, dtw, dtb that are needed: PARTIAL (rows, as many, channels)."""
    if PARTIAL is not None:
        COUNT: tl.constexpr = ASKED[0] + ASKED[1] + ASKED[2] + ASKED[3]
        to = PARTIAL + (row * COUNT).to(tl.int64) * channels + lane[0]
        if ASKED[0]:
            tl.store(to, gradients[0], mask=lane[2])
        if ASKED[1]:
            tl.store(to + ASKED[0] * channels, gradients[1], mask=lane[2])
        if ASKED[2]:
            tl.store(to + (ASKED[0] + ASKED[1]) * channels, gradients[2], mask=lane[2])
        if ASKED[3]:
            tl.store(to + (ASKED[0] + ASKED[1] + ASKED[2]) * channels, gradients[3], mask=lane[2])


@triton.jit
@no_type_check
def tangent(xh, txh, values, affine):
    """tu; the pointers only say what is there (0 * xh is not nothing to a compiler)."""
    tu = txh * values[0]
    if affine[2] is not None:
        tu += xh * values[2]
    if affine[3] is not None:
        tu += values[3]
    return tu


@triton.jit
@no_type_check
def silu(u):
    """f(u), f'(u) and f''(u) of u sigmoid(u)."""
    s = tl.sigmoid(u)
    return u * s, s * (1 + u * (1 - s)), s * (1 - s) * (2 + u * (1 - 2 * s))

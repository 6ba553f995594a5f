"""Tiles of a sample's pixels and of the channels of whole groups, the parts that the GroupNorm kernels are made of.

A tile is [pixels, lanes]: GROUPS groups lie side by side in the lanes, each padded from CPG channels to PAD of them.
Sums over the pixels leave one value a lane; `over_groups` then adds a group's lanes. A value of a group is a scalar
if there is one group, else it stands [1, lanes] in each lane of its group: both broadcast against a tile.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def lanes(block, groups, CPG: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """Of each lane, [1, lanes]: its channel, its group, whether it holds one, whether it is its group's first."""
    lane = tl.arange(0, GROUPS * PAD)[None, :]
    group = block * GROUPS + lane // PAD
    if CPG == PAD:  # Written so that the compiler sees neighbours, and reads them together.
        channel = block * GROUPS * PAD + lane
        there = channel < groups * CPG
    else:
        channel = group * CPG + lane % PAD
        there = (lane % PAD < CPG) & (group < groups)
    return channel, group, there, (lane % PAD == 0) & (group < groups)


@triton.jit
@no_type_check
def positions(pixel, channel, pixels, channels, LAST: tl.constexpr):
    """Where a tile lies in its sample: pixels [*, 1], channels [1, *]; LAST: channels_last."""
    return pixel * channels + channel if LAST else channel * pixels + pixel


@triton.jit
@no_type_check
def fetch(at, inside):
    """A tile in fp32, zero outside."""
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
@no_type_check
def parameter(at, channel, there, ABSENT: tl.constexpr):
    """A parameter of each lane in fp32, or the value that its absence stands for."""
    value = tl.full(channel.shape, ABSENT, tl.float32)
    if at is not None:
        value = tl.load(at + channel, mask=there, other=0).to(tl.float32)
    return value


@triton.jit
@no_type_check
def over_pixels(tile):
    """Sums over the pixels, one a lane."""
    return tl.sum(tile, axis=0)[None, :]


@triton.jit
@no_type_check
def over_groups(lane_sums, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """Sums over a group's lanes."""
    if GROUPS == 1:
        sums = tl.sum(lane_sums)
    else:
        sums = tl.sum(tl.reshape(lane_sums, (GROUPS, PAD)), axis=1)
        sums = tl.reshape(tl.broadcast_to(sums[:, None], (GROUPS, PAD)), (1, GROUPS * PAD))
    return sums


@triton.jit
@no_type_check
def total(tile, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """Sums over a group's pixels and lanes."""
    return tl.sum(tile) if GROUPS == 1 else over_groups(over_pixels(tile), PAD, GROUPS)


@triton.jit
@no_type_check
def group_value(at, sample, block, group, there, groups, GROUPS: tl.constexpr):
    """A value of each group, from (samples, groups)."""
    at += sample * groups
    return tl.load(at + block) if GROUPS == 1 else tl.load(at + group, mask=there, other=0)


@triton.jit
@no_type_check
def keep_group_value(at, value, sample, group, first, groups):
    """The inverse of `group_value`."""
    tl.store(at + sample * groups + group, value + tl.zeros(group.shape, tl.float32), mask=first)


@triton.jit
@no_type_check
def tangent(xh, txh, w, tw, tb, TW, TB):
    """tu; the pointers TW and TB only say what is there (0 * xh is not nothing to a compiler)."""
    tu = txh * w
    if TW is not None:
        tu += xh * tw
    if TB is not None:
        tu += tb
    return tu


@triton.jit
@no_type_check
def silu(u):
    """f(u), f'(u) and f''(u) of u sigmoid(u)."""
    s = tl.sigmoid(u)
    return u * s, s * (1 + u * (1 - s)), s * (1 - s) * (2 + u * (1 - 2 * s))

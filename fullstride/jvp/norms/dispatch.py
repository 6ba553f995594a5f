"""Norms of primals and tangents: torch's own if nothing carries a tangent, else the op."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.dual import check_pair, refuse_gradient_inside_jvp
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.implementation import chosen
from fullstride.jvp.mixed_batch import Batch, MixedBatch
from fullstride.jvp.norms import written_out
from fullstride.jvp.norms.group_configs import GroupSize, group_config
from fullstride.jvp.norms.layout import over_pixels
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.jvp.subclasses import PLAIN, materialized_all

Given = tuple[Tensor | None, ...]  # the first of the primals is never absent
Pair = tuple[Tensor, Tensor | None]
Dtype = torch.dtype | None  # format of the results; None means x's
# Limits of the kernels, which hold rows on the chip.
LONGEST_ROW, MOST_CHANNELS = 16384, 4096


@dataclass(frozen=True)
class Norm:
    """A norm, by functions of its primals and settings.

    Attributes:
        op: the dual op on primals and tangents.
        check: function that raises for invalid arguments.
        torchs: the norm in torch's own operations, for arguments without a tangent.
        written_out: the norm in elementary operations.
        settings: function that returns the op's settings.
        fits: function that tells whether the kernels support rows or groups of this length.

    """

    op: DualOp
    check: Callable[..., None]
    torchs: Callable[..., Tensor]
    written_out: Callable[..., Tensor]
    settings: Callable[..., tuple[Any, ...]] = lambda x, *settings: settings
    fits: Callable[..., bool] = lambda x, *settings: x.shape[-1] <= LONGEST_ROW

    def implementation(self, x: Tensor, settings: tuple[Any, ...], asked: str) -> str:
        """Choose `plain` or `triton`."""
        return chosen("auto" if asked == "fused" else asked, x, self.fits(x, *settings))

    def __call__(
        self, primals: Given, tangents: Given, settings: tuple, dtype: Dtype, implementation: str, tangent_grad: bool
    ) -> Pair:
        """Return the output and its tangent; the latter is None if no tangent is given."""
        x = _present(primals[0])
        self.check(*primals, *settings)
        _check_format(dtype)
        for primal, tangent in zip(primals, tangents, strict=True):
            check_pair(primal, tangent)
        runs, still = self.implementation(x, settings, implementation), all(tangent is None for tangent in tangents)
        if still and (implementation == "auto" or (implementation == "fused" and runs == "plain")):
            return self._of_torch(primals, settings, dtype), None
        return self.run(primals, tangents, settings, dtype, runs, tangent_grad)

    def first(self, primals: Given, tangents: Given, settings: tuple, dtype: Dtype, implementation: str) -> Pair | None:
        """Compute the norm with the tangents of the first samples in one kernel; None if no kernel supports that."""
        x, tangent = _present(primals[0]), tangents[0]
        if self.op is not GROUP_NORM or tangent is None or self.implementation(x, settings, implementation) != "triton":
            return None
        self.check(*primals, *settings)
        _check_format(dtype)
        for primal, of_first in zip(primals, tangents, strict=False):
            check_pair(primal if primal is None else primal[: len(tangent)], of_first)
        still = (None,) * (len(primals) - len(tangents))
        return self.run(primals, (*tangents, *still), settings, dtype, "triton", False)

    def run(
        self, primals: Given, tangents: Given, settings: tuple, dtype: Dtype, runs: str, tangent_grad: bool
    ) -> Pair:
        """The op, of what was checked."""
        refuse_gradient_inside_jvp()
        primals, tangents = _materialized(self.op.primals, primals), _materialized(self.op.tangents, tangents)
        kind = _present(primals[0]).device.type
        if dtype is None and kind != "cpu" and torch.is_autocast_enabled(kind):
            primals, tangents = (tuple(map(_full, half)) for half in (primals, tangents))
        own = self.settings(_present(primals[0]), *settings)
        return self.op(primals, tangents, (*own, dtype, runs), tangent_grad)

    def _of_torch(self, primals: Given, settings: tuple, dtype: Dtype) -> Tensor:
        """Compute torch's own norm; with a result format, in fp32 or better and rounded once."""
        if dtype is None:
            return self.torchs(*primals, *settings)
        full = (None if p is None else p.to(torch.promote_types(p.dtype, torch.float32)) for p in primals)
        return self.torchs(*full, *settings).to(dtype)


def _check_format(dtype: Dtype) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, expected a floating dtype, or None for x's dtype")


def _check(x: Tensor, least: int, shape: str, **parameters: Tensor | None) -> None:
    """Raise unless x has as many dimensions, and each parameter is one number for each column or channel."""
    if x.ndim < least:
        raise ValueError(f"x is {tuple(x.shape)}, expected {shape}")
    width = x.shape[1] if "C" in shape else x.shape[-1]
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):  # torch's own take the shape of a row here
            raise ValueError(f"{name} is a {type(parameter).__name__}, expected a tensor of {(width,)}, or None")
        if parameter.shape != (width,):
            raise ValueError(f"{name} is {tuple(parameter.shape)}, expected {(width,)}")


def _check_rows(x: Tensor, *given: Any) -> None:
    _check(x, 1, "(..., D)", **dict(zip(("weight", "bias"), given[:-1], strict=False)))


def _check_samples(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> None:
    _check(x, 2, "(B, ..., D)")
    expected = x.shape[0], x.shape[-1]
    for name, value in (("scale", scale), ("shift", shift)):
        if value.numel() != expected[0] * expected[1] or (value.shape[0], value.shape[-1]) != expected:
            raise ValueError(f"{name} is {tuple(value.shape)}, expected one row per sample: {expected}")


def _check_images(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    act: str | None,
) -> None:
    _check(x, 2, "(B, C, ...)", weight=weight, bias=bias)
    if shift is not None:
        check_shift(x, shift)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"groups is {groups}, expected a divisor of the {x.shape[1]} channels")
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")


def check_shift(x: Batch, shift: Batch) -> None:
    """Raise unless a shift is one number a channel of each sample."""
    if shift.shape != x.shape[:2]:
        expected = tuple(x.shape[:2])
        raise ValueError(f"shift is {tuple(shift.shape)}, expected one number a channel of each sample: {expected}")


def holds_groups(x: Batch, groups: int, act: str | None) -> bool:
    """Return whether kernels would hold whole groups of images on the chip, where a shift of them costs nothing."""
    if groups < 1 or x.shape[1] // groups > MOST_CHANNELS:
        return False
    x = x.primal if isinstance(x, MixedBatch) else x
    last = math.prod(x.shape[2:]) == 1 or not x.is_contiguous()
    sizes = len(x), groups, x.shape[1] // groups, math.prod(x.shape[2:]), last, x.dtype.itemsize, act is not None
    size = GroupSize(*sizes)
    return all(group_config(work, size).pixels >= size.pixels for work in ("forward", "detached"))


def _torchs_ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    y = F.layer_norm(x, x.shape[-1:], eps=eps)
    return (y * (1 + scale.reshape(one)) + shift.reshape(one)).to(y.dtype)


def _torchs_group_norm(
    x: Tensor, shift: Any, weight: Any, bias: Any, groups: int, eps: float, act: str | None
) -> Tensor:
    x = x if shift is None else x + over_pixels(shift, x)
    y = F.group_norm(x, groups, weight, bias, eps)
    return y if act is None else F.silu(y)


layer_norm = Norm(
    LAYER_NORM,
    _check_rows,
    lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    written_out.layer_norm,
)
rms_norm = Norm(
    RMS_NORM,
    _check_rows,
    lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
    written_out.rms_norm,
    settings=lambda x, eps: (torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps,),
)
ada_layer_norm = Norm(ADA_LAYER_NORM, _check_samples, _torchs_ada_layer_norm, written_out.ada_layer_norm)
group_norm = Norm(
    GROUP_NORM,
    _check_images,
    _torchs_group_norm,
    written_out.group_norm,
    settings=lambda x, groups, eps, act: (groups, eps, act or ""),
    fits=lambda x, groups, *_: x.shape[1] // groups <= MOST_CHANNELS,
)


def _materialized(names: tuple[str, ...], tensors: Given) -> Given:
    if all(x is None or (type(x) in PLAIN and x.layout is torch.strided) for x in tensors):
        return tensors
    return materialized_all(**dict(zip(names, tensors, strict=True)))


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _full(x: Tensor | None) -> Tensor | None:
    """Cast x to fp32, as CUDA's autocast does for norms."""
    return x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x

"""Helpers of the norms' tests: random inputs, and torch's own norms as the independent reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine

EPS = 1e-3
NAMES = {
    "layer_norm": ("weight", "bias"),
    "rms_norm": ("weight",),
    "ada_layer_norm": ("scale", "shift"),
    "group_norm": ("weight", "bias"),
}


@dataclass(frozen=True)
class Case:
    """A norm and the sizes of one call.

    Attributes:
        op: name of the op.
        shape: shape of x.
        groups, act: settings of a group norm.
        channels_last: whether x has that memory format.
        absent: names of those of tx, weight, bias, tweight, tbias that are None.

    """

    op: str
    shape: tuple[int, ...]
    groups: int = 1
    act: str | None = None
    channels_last: bool = False
    absent: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        extras = [self.act or "", "last" if self.channels_last else "", *(f"no_{a}" for a in sorted(self.absent))]
        size = "x".join(map(str, self.shape)) + (f"g{self.groups}" if self.op == "group_norm" else "")
        return "-".join([self.op, size, *filter(None, extras)])

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of weight and bias, or scale and shift."""
        if self.op == "ada_layer_norm":
            return (self.shape[0], self.shape[-1])
        return (self.shape[1 if self.op == "group_norm" else -1],)

    def draw(self, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> "Inputs":
        """Fresh random inputs, of different scales and means so that no term is lost among the others."""
        g = torch.Generator().manual_seed(seed)

        def normal(shape: tuple[int, ...], mean: float, std: float) -> Tensor:
            return (torch.randn(shape, generator=g, dtype=torch.float64) * std + mean).to(device, dtype)

        found: dict[str, Any] = {
            "x": self.laid(normal(self.shape, 0.7, 1.3)),
            "tx": self.laid(normal(self.shape, -0.4, 0.9)),
        }
        for name, mean in (("weight", 0.8), ("bias", -0.3), ("tweight", 0.2), ("tbias", 0.5)):
            found[name] = normal(self.parameter_shape, mean, 0.6)
        if self.op == "rms_norm":
            found |= {"bias": None, "tbias": None}
        found |= dict.fromkeys(self.absent)
        gradients = [self.laid(normal(self.shape, m, 1.1)) for m in (0.3, -0.6)]
        return Inputs(self, *found.values(), *gradients)

    def laid(self, a: Tensor) -> Tensor:
        """`a` in this case's memory layout."""
        if not self.channels_last:
            return a
        return a.contiguous(memory_format=torch.channels_last if a.dim() == 4 else torch.channels_last_3d)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call; None for absent ones."""

    case: Case
    x: Tensor
    tx: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    tweight: Tensor | None
    tbias: Tensor | None
    gy: Tensor
    gty: Tensor | None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """In the order of the op's arguments."""
        both = (self.weight, self.bias, self.tweight, self.tbias)
        return both[::2] if self.case.op == "rms_norm" else both

    @property
    def affine(self) -> Affine:
        """Arguments as the norms' functions take them."""
        return Affine(self.weight, self.bias, self.tweight, self.tbias)

    @property
    def primals(self) -> tuple[Tensor | None, ...]:
        """x, weight, bias."""
        return (self.x, self.weight, self.bias)

    @property
    def tangents(self) -> tuple[Tensor | None, ...]:
        """Tangents of `primals`."""
        return (self.tx, self.tweight, self.tbias)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Convert all tensors to another dtype."""
        there = {k: a.to(dtype) for k, a in vars(self).items() if isinstance(a, Tensor)}
        return replace(self, **there)

    def forward(self, module: Any, eps: float = EPS, **kwargs: Any) -> Any:
        """The op of a module on these inputs."""
        if self.case.op == "group_norm":
            given: Any = (self.x, self.tx, self.case.groups, self.affine, eps, self.case.act)
            return module.group_norm(*given, **kwargs)
        return module.row_norm(ROW_NORMS[self.case.op], self.x, self.tx, self.affine, eps, **kwargs)

    def backward(self, module: Any, moments: Sequence[Tensor], detached: bool = False, **kwargs: Any) -> Any:
        """The op's gradients, from (mean, rstd) or (rstd,)."""
        given = (self.gy, None if detached else self.gty, self.x, self.tx)
        if self.case.op == "group_norm":
            given = (*given, self.case.groups, self.affine, tuple(moments), self.case.act)
            return module.group_norm_backward(*given, **kwargs)[:6]  # without those of shifts
        norm = ROW_NORMS[self.case.op]
        found = module.row_norm_backward(norm, *given, self.affine, tuple(moments), **kwargs)
        return (*found[:3], found[4]) if self.case.op == "rms_norm" else found


def written_out_layer_norm(
    x: Tensor, _: object, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """LayerNorm from plain operations.

    torch's own gradient through the tangent of `F.layer_norm` is wrong (2.13: it holds mean and rstd constant), which
    finite differences show; its first derivatives are right.
    """
    y = (x - x.mean(-1, keepdim=True)) * (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def reference(case: Case, eps: float = EPS, twice: bool = False) -> Callable[..., Tensor]:
    """The norm as a user would write it, of x, weight, bias (None if absent); `twice` differentiable or once."""
    layer_norm = written_out_layer_norm if twice else F.layer_norm

    def row(a: Tensor) -> Tensor:
        return a if len(case.shape) == 2 else a[:, None]

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if case.op == "layer_norm":
            return layer_norm(x, x.shape[-1:], weight, bias, eps)
        if case.op == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        if case.op == "ada_layer_norm":
            assert weight is not None
            assert bias is not None
            return layer_norm(x, x.shape[-1:], eps=eps) * (1 + row(weight)) + row(bias)
        # torch's own derivative of a group norm fails on channels_last.
        y = F.group_norm(x.contiguous(), case.groups, weight, bias, eps)
        return F.silu(y) if case.act else y

    return run


def reference_dual(inputs: Inputs, eps: float = EPS, twice: bool = False) -> tuple[Tensor, Tensor]:
    """(y, ty) by torch.func.jvp; an absent tangent is zero."""
    there = [i for i, p in enumerate(inputs.primals) if p is not None]

    def of_those(*given: Tensor) -> Tensor:
        full: list[Any] = [None, None, None]
        for i, a in zip(there, given, strict=True):
            full[i] = a
        return reference(inputs.case, eps, twice)(*full)

    primals: list[Any] = [inputs.primals[i] for i in there]
    given = [inputs.tangents[i] for i in there]
    tangents = [torch.zeros_like(p) if t is None else t for p, t in zip(primals, given, strict=True)]
    y, ty = torch.func.jvp(of_those, tuple(primals), tuple(tangents))[:2]
    return y, ty


def reference_gradients(inputs: Inputs, detached: bool = False, eps: float = EPS) -> list[Tensor | None]:
    """Gradients of gy . y + gty . ty by torch.autograd, of (x, tx) and the parameters; None if absent."""
    leaves = {k: a.detach().requires_grad_() for k, a in vars(inputs).items() if isinstance(a, Tensor)}
    given = replace(inputs, **leaves)
    y, ty = reference_dual(given, eps, twice=True)
    loss = (y * inputs.gy).sum()
    if not detached and inputs.gty is not None:
        loss = loss + (ty * inputs.gty).sum()
    asked = (given.x, given.tx, *given.parameters)
    found = iter(torch.autograd.grad(loss, [a for a in asked if a is not None], allow_unused=True))
    return [None if a is None else next(found) for a in asked]


def relative_error(got: Tensor, want: Tensor | None) -> float:
    """||got - want|| / ||want||; NaN if got holds one, or if `want` is zero."""
    if want is None:
        return torch.nan
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm()).item()

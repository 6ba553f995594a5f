"""Attention in elementary operations, for torch's own derivatives, and inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TENSORS = ("q", "k", "v", "tq", "tk", "tv")


def visible(lq: int, lk: int, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Return whether query i sees key j, by the definition."""
    left, right = window or (-1, -1)
    rows = [
        [(not causal or j <= i) and (left < 0 or j >= i - left) and (right < 0 or j <= i + right) for j in range(lk)]
        for i in range(lq)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(lq, lk)


@dataclass(frozen=True)
class Case:
    """Inputs of one attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    tq: Any  # Tensor or None, as the tests index what they know to be there
    tk: Any
    tv: Any
    scale: float
    mask: Any = None
    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def inputs(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """The six tensors."""
        return self.q, self.k, self.v, self.tq, self.tk, self.tv

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that are not differentiated."""
        return {"scale": self.scale, "mask": self.mask, "causal": self.causal, "window": self.window}

    def to(self, *args: Any) -> "Case":
        """Convert to another dtype or device; a boolean mask keeps its dtype."""
        moved = {name: x.to(*args) for name in TENSORS if (x := getattr(self, name)) is not None}
        mask = self.mask
        if mask is not None:
            mask = mask.to(*args) if mask.is_floating_point() else mask.to(self.q.to(*args).device)
        return replace(self, **moved, mask=mask)


def transposed(x: Tensor) -> Tensor:
    """Return x's values as a transposed view of (B, L, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def draw(
    seed: int,
    b: int = 2,
    h: int = 4,
    hk: int | None = None,
    lq: int = 37,
    lk: int | None = None,
    d: int = 16,
    dv: int | None = None,
    *,
    mask: str | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    absent: str = "",
    layout: Callable[[Tensor], Tensor] = torch.clone,
) -> Case:
    """Normal inputs in fp64.

    `mask` is "bool" (one for all heads, row 1 sees nothing), "heads" (one a head) or "additive" (with -inf); `absent`
    names the tangents that are None.
    """
    g = torch.Generator().manual_seed(seed)
    hk, lk, dv = hk or h, lk or lq, dv or d
    shapes = [(b, h, lq, d), (b, hk, lk, d), (b, hk, lk, dv)] * 2
    tensors = [layout(torch.randn(shape, generator=g, dtype=torch.float64)) for shape in shapes]
    given: dict[str, Any] = {n: None if n in absent.split() else x for n, x in zip(TENSORS, tensors, strict=True)}
    drawn = torch.rand(b, h if mask == "heads" else 1, lq, lk, generator=g) < 0.7
    drawn[..., min(1, lq - 1), :] = False
    bias = torch.randn(1, h, lq, lk, generator=g, dtype=torch.float64).masked_fill(~drawn[:1], -torch.inf)
    full = None if mask is None else (bias if mask == "additive" else drawn).expand(b, h, lq, lk)
    return Case(**given, scale=1.3 * d**-0.5, mask=full, causal=causal, window=window)


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(scale q k^T + mask) v with zeros if a row sees nothing."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = case.scale * q @ k.transpose(-2, -1)
    seen = visible(q.shape[2], k.shape[2], case.causal, case.window).to(q.device).expand(s.shape)
    if case.mask is not None and case.mask.dtype == torch.bool:
        seen = seen & case.mask
    elif case.mask is not None:
        seen = seen & (case.mask != -torch.inf)
        s = s + case.mask.masked_fill(case.mask == -torch.inf, 0.0)
    # A finite stand-in for -inf keeps torch's derivatives free of NaN where a row sees nothing.
    p = torch.softmax(s.masked_fill(~seen, -1e4), -1) * seen
    return p @ v


def expected_forward(case: Case) -> tuple[Tensor, Tensor]:
    """Compute o and to by torch.func.jvp."""
    primals = case.q, case.k, case.v
    tangents = tuple(torch.zeros_like(x) if t is None else t for x, t in zip(primals, case.inputs[3:], strict=True))
    o, to, *_ = torch.func.jvp(lambda *x: attend(case, *x), primals, tangents)
    return o, to


def expected_backward(case: Case, go: Tensor, gto: Tensor | None) -> list[Tensor | None]:
    """Six gradients, by torch.autograd.grad of `expected_forward`; None if a tangent is absent or detached."""
    leaves = {n: x.detach().clone().requires_grad_() for n in TENSORS if (x := getattr(case, n)) is not None}
    o, to = expected_forward(replace(case, **leaves))
    total = (o * go).sum() + (0.0 if gto is None else (to * gto).sum())
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=gto is not None)
    return [dict(zip(leaves, found, strict=True)).get(n) for n in TENSORS]

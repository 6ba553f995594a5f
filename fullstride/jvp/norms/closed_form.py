r"""The mathematics of the dual norms, once for all of them, on plain tensors of any float format.

A group of elements x (a row's last dimension, or a group's channels and pixels) with mean <.> is normalised;
its tangent t and a gradient g go through the same symmetric map A:

    m = <x>   r = 1 / sqrt(<(x - m)^2> + eps)   xh = r (x - m)   A(t) = r (t - <t> - xh <xh t>)   txh = A(t)
    u = w xh + b   tu = w txh + tw xh + tb   y = f(u)   ty = f'(u) tu,   f the identity or SiLU.

RMSNorm is the same with m = 0 and A(t) = r (t - xh <xh t>); adaptive LayerNorm has w = 1 + scale, b = shift.
The gradients gy of y and gty of ty give

    gtu = f'(u) gty   gu = f'(u) gy + f''(u) tu gty   g = w gu + tw gtu   h = w gtu   c = <xh t>   d = <xh h>
    dt = A(h)   dx = A(g) - r (r c (h - <h>) + d txh + xh (<h txh> - r c d))
    dw = sum(gu xh + gtu txh)   db = sum(gu)   dtw = sum(gtu xh)   dtb = sum(gtu).

What dx has beside A(g) is the derivative in x of A(t): A holds xh twice and the factor r. In c, t is taken less its
mean: xh has mean zero, but only up to rounding.

`None` stands for what is absent: a tangent that is zero, a weight that is one, a bias that is zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fullstride.jvp.norms.shapes import Gradients


class Affine(NamedTuple):
    """Weight, bias and their tangents, each of a shape that broadcasts to x's."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    tweight: Tensor | None = None
    tbias: Tensor | None = None


class RowNorm(NamedTuple):
    """A norm of the last dimension.

    Attributes:
        centred: whether the mean is subtracted.
        modulated: each sample has its own scale, which comes on top of one, and shift.

    """

    centred: bool = True
    modulated: bool = False


ROW_NORMS = {
    "layer_norm": RowNorm(),
    "rms_norm": RowNorm(centred=False),
    "ada_layer_norm": RowNorm(modulated=True),
}


class NormKind(NamedTuple):
    """Kind of norm: dimensions of a group's elements, whether the mean is subtracted, whether SiLU follows."""

    dims: tuple[int, ...]
    centred: bool = True
    silu: bool = False

    def mean(self, a: Tensor) -> Tensor:
        """<a>."""
        first, *pixels = self.dims
        if pixels and a.device.type == "cpu" and a.stride(first) == 1:
            # In channels_last PyTorch sums such groups sequentially on a CPU, which is slow and loses digits.
            a = a.mean(pixels, keepdim=True)
            return a.mean(first, keepdim=True)
        return a.mean(self.dims, keepdim=True)

    def less_mean(self, a: Tensor) -> Tensor:
        """a - <a>, or a itself if the norm keeps the mean."""
        return a - self.mean(a) if self.centred else a

    def project(self, t: Tensor, xh: Tensor, r: Tensor) -> Tensor:
        """A(t)."""
        t = self.less_mean(t)
        return torch.addcmul(t, xh, self.mean(xh * t), value=-1) * r


def forward(
    x: Tensor, tx: Tensor | None, affine: Affine, kind: NormKind, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """y, ty (None if no tangent is given), m and r."""
    m = kind.mean(x)
    xc = x - m if kind.centred else x
    r = torch.rsqrt(kind.mean(xc.square()) + eps)
    xh = xc * r
    txh = None if tx is None else kind.project(tx, xh, r)
    u, tu = _affine(xh, txh, affine)
    if not kind.silu:
        return u, tu, m, r
    s = torch.sigmoid(u)
    y = u * s
    return y, None if tu is None else tu * _slope(s, y), m, r


def backward(
    gy: Tensor, gty: Tensor | None, x: Tensor, tx: Tensor | None, affine: Affine, kind: NormKind, m: Tensor, r: Tensor
) -> Gradients:
    """Gradients of (x, tx, weight, bias, tweight, tbias); None for an absent input or without the gty that it needs."""
    xh = (x - m if kind.centred else x) * r
    txh = None if tx is None or gty is None else kind.project(tx, xh, r)
    gu, gtu = _through_silu(gy, gty, *_affine(xh, txh, affine)) if kind.silu else (gy, gty)
    dx = kind.project(_plus(_scaled(gu, affine.weight), _times(gtu, affine.tweight)), xh, r)
    dtx = None
    if tx is not None and txh is not None and gtu is not None:
        h = _scaled(gtu, affine.weight)
        dtx = kind.project(h, xh, r)
        dx = dx - _curvature(h, tx, xh, txh, r, kind)
    return (
        dx,
        dtx,
        _sum_to(_plus(gu * xh, _times(gtu, txh)), affine.weight),
        _sum_to(gu, affine.bias),
        _sum_to(_times(gtu, xh), affine.tweight),
        _sum_to(gtu, affine.tbias),
    )


def _curvature(h: Tensor, t: Tensor, xh: Tensor, txh: Tensor, r: Tensor, kind: NormKind) -> Tensor:
    """Compute the term that dx loses because A(t) depends on x."""
    h = kind.less_mean(h)
    rc, d = r * kind.mean(xh * kind.less_mean(t)), kind.mean(xh * h)
    return r * (rc * h + d * txh + xh * (kind.mean(h * txh) - rc * d))


def _affine(xh: Tensor, txh: Tensor | None, affine: Affine) -> tuple[Tensor, Tensor | None]:
    u = _scaled(xh, affine.weight)
    u = u if affine.bias is None else u + affine.bias
    tu = None if txh is None else _scaled(txh, affine.weight)
    for term in (_times(xh, affine.tweight), affine.tbias):
        if term is not None:
            tu = torch.zeros_like(xh) + term if tu is None else tu + term
    return u, tu


def _slope(s: Tensor, y: Tensor) -> Tensor:
    """f'(u) = s + y (1 - s) of SiLU, with s = sigmoid(u) and y = u s."""
    return torch.lerp(s, s.new_ones(()), y)


def _through_silu(gy: Tensor, gty: Tensor | None, u: Tensor, tu: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """gu and gtu."""
    s = torch.sigmoid(u)
    slope = _slope(s, u * s)
    gu = gy * slope
    if gty is None or tu is None:
        return gu, _times(gty, slope)
    return gu + gty * tu * s * (1 - s) * (2 + u * (1 - 2 * s)), gty * slope


def _scaled(a: Tensor, weight: Tensor | None) -> Tensor:
    return a if weight is None else a * weight


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a * b


def _plus(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a + b


def _sum_to(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.sum_to_size(parameter.shape)

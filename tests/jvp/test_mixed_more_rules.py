"""More operations of a shared pass, against PyTorch's own derivative of the samples that move."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullstride.jvp import partial_jvp
from tests.jvp.test_mixed_batch import BESIDE, MATRIX, B, N, randn

SQUARE = randn(B, 6, seed=12)  # as many rows as samples, which is no batch
FUNCTIONS = {
    "exponentials": lambda x, y: x.exp() * y.sigmoid() + torch.tanh(x) + F.softplus(y) - torch.expm1(x * y),
    "roots": lambda x, y: (x.square() + 1).sqrt() + (y.abs() + 1).log() + (x**2 + 1).rsqrt() + (y * y + 1).pow(-0.3),
    "kinks": lambda x, y: (
        F.relu(x) + x.clamp(-0.5, 0.7) * y + F.leaky_relu(y, 0.2) + torch.maximum(x, y) + F.elu(x) * y
    ),
    "activations": lambda x, y: F.mish(x) + F.hardswish(y) + F.logsigmoid(x) * y + F.selu(y) + F.glu(x, 1)[:, :1],
    "where": lambda x, y: torch.where(x > 0, x.sin(), y * y) + torch.where(BESIDE > 0, y, 0.0) + (y < x) * x,
    "quotients": lambda x, y: x / (y * y + 1) + BESIDE / (x.square() + 2) + 1 / (y.exp() + 1),
    "softmax": lambda x, y: (
        torch.softmax(x, 1) + F.softmax(y, dim=-1) * x + x.log_softmax(2) + torch.logsumexp(y, 1, True)
    ),
    "means": lambda x, y: (
        (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1).sqrt() + y.sum((2, 3), keepdim=True)
    ),
    "shapes": lambda x, y: (
        x.reshape(B, 4, -1).sin().view(B * 2, 2, 36).cos().reshape(x.shape) * y.view(x.size(0), 4, 6, 6)
    ),
    "heads": lambda x, y: x.reshape(B * 4, 6, 6).softmax(-1).reshape(B, 4, 6, 6) @ y,
    "stack": lambda x, y: torch.stack([x, BESIDE, y * y], dim=2).mean(2) + torch.stack((x, y), -1).prod(-1),
    "split": lambda x, y: torch.cat(x.sin().split(2, 1)[::-1], 1) * y.split([1, 3], dim=1)[0],
    "expand": lambda x, y: x[:, :1].expand(-1, 4, -1, -1) * y[:, :, :1].squeeze(2)[:, :, None].expand(B, 4, 6, 6),
    "matmul": lambda x, y: x @ y.transpose(2, 3) + torch.matmul(x, MATRIX[:6]) + (MATRIX[:6] @ y) @ BESIDE,
    "rows": lambda x, y: (x[:, 0, 0] @ SQUARE.T[:, :5].sin()).unsqueeze(2).unsqueeze(3) * y[:, :1],
    "bmm": lambda x, y: torch.bmm(x[:, 0], y[:, 1])[:, None] + torch.bmm(BESIDE[:, 0], x[:, 2])[:, None],
    "einsum": lambda x, y: (
        torch.einsum("bchw,bdhw->bcd", x, y)[:, :, :1, None] + torch.einsum("bchw,wk->bchk", x, MATRIX.T)
    ),
    "einsum of all": lambda x, y: torch.einsum("bchw,bchw->bch", x, BESIDE)[..., None] * y,
    "interpolate": lambda x, y: F.interpolate(x * y, scale_factor=2, mode="bilinear") + F.interpolate(y, (12, 12)),
    "pools": lambda x, y: (
        F.avg_pool2d(x * y, 2) + F.max_pool2d(y, 2) + F.adaptive_avg_pool2d(x, 3) * F.pixel_unshuffle(y, 2)[:, :4]
    ),
    "pad": lambda x, y: (
        F.pad(x.sin(), (1, 1, 0, 2)) + F.pad(y, (1, 1, 1, 1), value=2.0)[:, :, :, :].mean(2, keepdim=True)
    ),
    "convolutions": lambda x, y: (
        F.conv_transpose2d(x * x, MATRIX[:4, :3, None, None].expand(4, 3, 2, 2), stride=2)
        + F.conv1d(y.flatten(2), MATRIX[:3, :4, None])[..., None].sum(2, keepdim=True)
    ),
    "in place": lambda x, y: in_place(x, y),
}


def in_place(x, y):
    """Also of views, which change what they are views of."""
    h = x * 2
    g = h
    h += y
    h.mul_(y.sin())
    h[:, 1:3].add_(1.5)
    part = h[..., :2]
    part -= BESIDE[..., :2]
    part *= 3
    h.relu_()
    return g + h


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_tangent_is_pytorchs_of_the_samples_that_move(name, seed):
    f = FUNCTIONS[name]
    x, y = randn(B, 4, 6, 6, seed=seed), randn(B, 4, 6, 6, seed=seed + 1)
    moves = randn(N, 4, 6, 6, seed=seed + 2), randn(N, 4, 6, 6, seed=seed + 3)
    given = [a.clone() for a in (x, y, *moves)]
    out, moved = partial_jvp(f, (x, y), moves)
    torch.testing.assert_close(out, f(x, y), rtol=1e-12, atol=1e-12)
    whole = tuple(torch.cat([m, torch.zeros(B - N, 4, 6, 6, dtype=m.dtype)]) for m in moves)
    expected = torch.func.jvp(f, (x, y), whole)[1]
    torch.testing.assert_close(moved, expected[:N], rtol=1e-9, atol=1e-9)
    assert expected[:N].norm() > 1
    assert not moved.requires_grad
    torch.testing.assert_close([x, y, *moves], given, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_primals(name):
    f = FUNCTIONS[name]
    x, y = (randn(B, 4, 6, 6, seed=s).requires_grad_() for s in (1, 2))
    moves = randn(N, 4, 6, 6, seed=3), randn(N, 4, 6, 6, seed=4)
    found = [torch.autograd.grad(g(x, y).square().sum(), (x, y)) for g in (f, lambda *z: partial_jvp(f, z, moves)[0])]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


REFUSED = {
    "softmax over samples": lambda x: torch.softmax(x, 0),
    "mean of all": lambda x: x - x.mean(),
    "mean over samples": lambda x: x - x.mean(0),
    "samples by samples": lambda x: x @ x.transpose(0, 1),
    "samples contracted": lambda x: torch.randn(5, 5) @ x,
    "one-dimensional": lambda x: x[:, 0] @ torch.randn(5),
    "einsum over samples": lambda x: torch.einsum("bi,bj->ij", x, x),
    "einsum of two samples": lambda x: torch.einsum("bi,ci->bc", x, x),
    "stack in front": lambda x: torch.stack([x, x]),
    "split samples": lambda x: x.split(2)[0],
    "rows of both": lambda x: x.reshape(3, 5),
    "channels for samples": lambda x: F.avg_pool1d(x, 2),
    "padded samples": lambda x: F.pad(x, (0, 0, 1, 1)),
    "expanded": lambda x: x.expand(2, 5, 3),
    "sum of samples": lambda x: x.sum(0),
    "std over negative": lambda x: x.std(-2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_mix_samples_is_refused(name):
    with pytest.raises(ValueError, match="some(?: samples)? carry a tangent|expected the samples in front"):
        partial_jvp(REFUSED[name], (torch.randn(5, 3),), (torch.randn(2, 3),))


def test_networks_of_torchs_own_modules_take_it():
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ELU(), nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Hardswish(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 6),
        nn.Tanh(), nn.Softmax(-1),
    ).double()  # fmt: skip
    x, v = randn(B, 2, 8, 8), randn(N, 2, 8, 8, seed=1)
    out, moved = partial_jvp(net, (x,), (v,))
    torch.testing.assert_close(out, net(x))
    torch.testing.assert_close(moved, torch.func.jvp(net, (x[:N],), (v,))[1], rtol=1e-9, atol=1e-12)

"""Rules of eager `jvp`: PyTorch's own values, tangents and gradients, without a graph and without shared memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fullstride.jvp import jvp, tangent_rules
from fullstride.jvp.function_modes import DetachedTangents

# Calls on x (3, 4), y (4,) and w (5, 4), by what carries a tangent: x alone, or x and y.
ONE = {
    "linear": lambda x, y, w: F.linear(x, w, w[:, 0]),
    "linear by keyword": lambda x, y, w: F.linear(x, weight=w, bias=w[:, 0]),
    "conv1d": lambda x, y, w: F.conv1d(x[None], w[:, :3, None], w[:, 0], padding=1, stride=2),
    "conv2d": lambda x, y, w: F.conv2d(x[None, None], w[None, None, :2, :2], None, 1, 1),
    "conv3d": lambda x, y, w: F.conv3d(x[None, None, None], w[None, None, None, :2, :2], groups=1),
    "transposed": lambda x, y, w: F.conv_transpose1d(x[None], w[:3, None], w[:1, 0], 2, 1, 1),
    "transposed in 2d": lambda x, y, w: F.conv_transpose2d(x[None, None], w[None, None], stride=2, output_padding=1),
    "transposed in 3d": lambda x, y, w: F.conv_transpose3d(x[None, None, None], w[None, None, None, :2], groups=1),
    "matmul": lambda x, y, w: x @ w.T + torch.matmul(x, y)[:, None] - x.mm(w.T) * torch.mv(x, y)[:, None],
    "matmul reversed": lambda x, y, w: torch.bmm(w[None, :, :3], x[None]) + torch.matmul(w[:, :3], x.unsqueeze(0)),
    "add": lambda x, y, w: x + y,
    "add reversed": lambda x, y, w: y + x,
    "add a number": lambda x, y, w: 3 + x,
    "add a scaled one": lambda x, y, w: torch.add(x, y, alpha=-2),
    "add to more dimensions": lambda x, y, w: w[:, None] + x,
    "add an integer tensor": lambda x, y, w: x + torch.arange(4),
    "add in place afterwards": lambda x, y, w: (x + y).add_(x).mul_(y),
    "sub": lambda x, y, w: x - y,
    "sub reversed": lambda x, y, w: y - x,
    "sub from a number": lambda x, y, w: 1 - x,
    "mul": lambda x, y, w: x * y,
    "mul reversed": lambda x, y, w: y * x,
    "mul by a number": lambda x, y, w: 2 * x * 0.5,
    "mul by itself": lambda x, y, w: x * x,
    "mul by keyword": lambda x, y, w: torch.mul(x, other=y),
    "div": lambda x, y, w: x / (2 + y * y),
    "div by a number": lambda x, y, w: x / 3,
    "div of a constant": lambda x, y, w: y / (2 + x * x),
    "div rounded": lambda x, y, w: torch.div(x, y, rounding_mode="floor"),
    "silu": lambda x, y, w: F.silu(x),
    "silu in place": lambda x, y, w: F.silu(x * 2, inplace=True),
    "gelu": lambda x, y, w: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "relu": lambda x, y, w: F.relu(x) + x.relu() + torch.relu(x),
    "relu in place": lambda x, y, w: F.relu(x * 2, inplace=True),
    "sigmoid": lambda x, y, w: x.sigmoid() * torch.sigmoid(x),
    "tanh": lambda x, y, w: x.tanh() * torch.tanh(x),
    "softmax": lambda x, y, w: F.softmax(x, -1) + x.softmax(dim=0) + torch.softmax(x, 1),
    "softmax of another format": lambda x, y, w: F.softmax(x, -1, dtype=torch.float32).double(),
    "joined": lambda x, y, w: torch.stack([x, w[:3], x.flip(0)], 1).sum(1) + torch.cat([x[:1], y[None], x[1:]])[:3],
    "cast": lambda x, y, w: x.to(torch.float32).double() + x.to(torch.int64) + x.type_as(y) + x.float().to(x),
    "copied": lambda x, y, w: x.T.reshape(12)[[3, 1, 1]].repeat(4) + x.T.contiguous().flatten() - x.T.clone().flatten(),
    "interpolated": lambda x, y, w: F.interpolate(x[None], scale_factor=2.0, mode="linear").neg(),
    "reshaped": lambda x, y, w: torch.cat([x.T.reshape(2, 6).unbind(0)[1], x.flatten()[3:], y, x.mean(0)]),
    "of complex numbers": lambda x, y, w: _complex(x).sigmoid().imag + torch.tanh(_complex(x)).real,
    "written products": lambda x, y, w: (w[:, :3] @ x).mul_(y) + F.conv1d(x, w[:3, :3, None]).mul_(y).sum(0),
    "a written view": lambda x, y, w: _written(x * 1, y),
    "without gradients": lambda x, y, w: _constant(x) + x * y,
}
BOTH = {
    "add": lambda x, y, w: x + y,
    "sub": lambda x, y, w: y - x,
    "mul": lambda x, y, w: x * y,
    "matmul": lambda x, y, w: x @ y + (x @ x.T).matmul(x) @ y + y @ w.T @ w @ y,
    "mul by fewer": lambda x, y, w: y * x.sum() * w,
    "div": lambda x, y, w: x / (2 + y * y),
    "linear in its weight": lambda x, y, w: F.linear(x, y[None] * w, y[:1].expand(5)),
    "conv in its weight": lambda x, y, w: F.conv1d(x[None], y[None, :3, None] * w[:, :3, None]),
}


def _written(x: Tensor, y: Tensor) -> Tensor:
    x.view(-1)[3:7] += y
    x[0] *= 2
    return x


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.sin())


def _constant(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("name", [*ONE, *(f"both: {name}" for name in BOTH)])
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no_grad"])
def test_values_tangents_and_gradients_are_torchs(name, grad, seed):
    g = torch.Generator().manual_seed(seed)
    x, y, w, tx, ty = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((3, 4), 4, (5, 4), (3, 4), 4))
    both = name.startswith("both: ")
    call = BOTH[name[6:]] if both else ONE[name]
    leaves = [t.requires_grad_(grad) for t in (x, y, w)]
    primals, tangents = ((x, y), (tx, ty)) if both else ((x,), (tx,))
    fn = lambda x, *rest: call(x, *(rest or (y,)), w)  # noqa: E731
    out, tangent = jvp(fn, primals, tangents)
    expected, moved, *_ = torch.func.jvp(fn, primals, tangents)
    torch.testing.assert_close((out, tangent), (expected, moved))
    assert not tangent.requires_grad
    if out.requires_grad:
        ours, theirs = (torch.autograd.grad(o.sin().sum(), leaves, allow_unused=True) for o in (out, expected))
        torch.testing.assert_close(ours, theirs)


def test_a_dual_has_a_tangent_of_its_own(seed):
    torch.manual_seed(seed)
    x, t, y = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    with forward_ad.dual_level(), DetachedTangents():
        dual = forward_ad.make_dual(x.clone(), t.clone())
        for made in (dual + 1, dual + y, y - dual, dual * 1, dual / 1, 0 + dual):
            made.mul_(7)
        kept = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(kept, t, rtol=0, atol=0)


def test_autocast_gives_primals_and_tangents_one_format(seed):
    torch.manual_seed(seed)
    first = torch.nn.Linear(4, 8)
    net = torch.nn.Sequential(first, torch.nn.SiLU(), torch.nn.Linear(8, 3), torch.nn.Softmax(-1))
    x, t = torch.randn(5, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = jvp(net, (x,), (t,))
        expected, moved, *_ = torch.func.jvp(net, (x,), (t,))
    assert out.dtype == tangent.dtype == expected.dtype
    torch.testing.assert_close((out, tangent), (expected, moved), rtol=0.05, atol=0.02)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), first.weight)
    assert gradient.any()


def test_a_function_has_a_rule_or_returns_views():
    assert all(callable(f) for f in tangent_rules.RULES)
    assert len(tangent_rules.RULES) > 30
    assert torch.Tensor.view in tangent_rules.VIEWS
    assert not tangent_rules.VIEWS & tangent_rules.RULES.keys()

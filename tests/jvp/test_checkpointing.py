import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.jvp import checkpoint, jvp
from tests.jvp.networks import saved_bytes


def block(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.Linear(32, 8))


class Gate(nn.Module):
    """Module of two arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) * y


class Net(nn.Module):
    """Two blocks, each through `run`."""

    def __init__(self, run: Callable, dropout: float = 0.0):
        super().__init__()
        self.run = run
        self.first, self.second, self.gate = block(dropout), block(dropout), Gate()

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.run(self.first, x)
        return self.run(self.gate, self.run(self.second, h), x.sin())


def plain(module: nn.Module, *args: Tensor) -> Tensor:
    return module(*args)


def pair(dropout: float = 0.0) -> tuple[Net, Net]:
    """Return two nets of equal weights, without and with checkpoints."""
    one = Net(plain, dropout)
    two = copy.deepcopy(one)
    two.run = checkpoint
    return one, two


def gradients(net: Net, x: Tensor, v: Tensor | None) -> list[Tensor]:
    """Outputs, and MeanFlow's gradients, of x too."""
    x = x.clone().requires_grad_()
    u, du = jvp(net, (x,), (v,)) if v is not None else (net(x), torch.zeros(()))
    loss = (u - du.detach()).square().sum()
    return [u, du, *torch.autograd.grad(loss, [x, *net.parameters()])]


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_values_and_gradients_are_those_without_it(moving, dropout, seed):
    torch.manual_seed(seed)
    nets, (x, v) = pair(dropout), torch.randn(2, 5, 8)
    results = []
    for net in nets:
        torch.manual_seed(seed + 1)
        results.append(gradients(net, x, v if moving else None))
        results[-1].append(torch.rand(3))  # what is random afterwards is as without it
    torch.testing.assert_close(*results)


class OwnDropout(nn.Module):
    """Module with dropout in its own code, not in a dropout layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


class OwnAttention(nn.Module):
    """Attention whose weights are dropped by the library's module itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("kind", [OwnDropout, OwnAttention])
def test_a_module_that_draws_in_its_own_code_draws_alike_again(kind, seed):
    torch.manual_seed(seed)
    net, x = kind().train(), torch.randn(3, 5, 8)
    found = []
    for run in (plain, checkpoint):
        torch.manual_seed(seed + 1)
        found.append(torch.autograd.grad(run(net, x).square().sum(), list(net.parameters())))
    torch.testing.assert_close(*found)


def test_autocast_is_as_it_was(seed):
    torch.manual_seed(seed)
    nets, (x, v) = pair(), torch.randn(2, 5, 8)
    formats = []
    line = next(m for m in nets[1].modules() if isinstance(m, nn.Linear))
    line.register_forward_hook(lambda module, given, out: formats.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        graphs = [jvp(net, (x,), (v,))[0].float().square().sum() for net in nets]
    found = [torch.autograd.grad(graph, list(net.parameters())) for graph, net in zip(graphs, nets, strict=True)]
    assert formats == [torch.bfloat16] * 2
    # The norms of the second forward pass are torch's own, whose bf16 is rounded otherwise.
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 2**-6 * b.norm()


@pytest.mark.parametrize("moving", [True, False])
def test_only_arguments_are_kept(moving, seed):
    torch.manual_seed(seed)
    x, v = torch.randn(2, 64, 8)
    one, two = (saved_bytes(lambda net=net: jvp(net, (x,), (v,))[0] if moving else net(x)) for net in pair())
    weights = sum(p.numel() * p.itemsize for p in pair()[0].parameters())
    assert two - weights < 0.4 * (one - weights)


def test_without_gradients_it_is_the_module(seed):
    torch.manual_seed(seed)
    one, two = pair()
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(one(x), two(x))


def test_other_transforms_are_refused():
    _, net = pair()
    x = torch.ones(2, 8)
    for call in (torch.func.jvp, functools.partial(jvp, tangent_grad=True)):
        derivative: Any = call
        with pytest.raises(RuntimeError, match="expected fullstride.jvp.jvp without tangent_grad"):
            derivative(net, (x,), (x,))

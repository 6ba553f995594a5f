"""Run in a process of its own: how many products a compiled derivative takes."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from fullstride.meanflow.objective.loss import MeanFlowLoss

PRODUCTS = ("aten.convolution.default", "aten.mm.default", "aten.addmm.default")
NETWORKS = {
    "unet": lambda: UNet(3, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,)),
    "song_unet": lambda: SongUNet(3, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,)),
    "dit": lambda: DiT(3, 8, patch_size=2, width=16, depth=2, heads=2),
}
# Of one resolution or one block: a trace takes as long as a network has layers.
SMALL = {
    "unet": lambda: UNet(3, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=(8,)),
    "song_unet": lambda: SongUNet(
        3, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=(8,), dropout=0.0
    ),
    "dit": lambda: DiT(3, 8, patch_size=2, width=16, depth=1, heads=2),
}


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def products(seen: Counter[str]) -> int:
    """Convolutions, and products that are no attention's."""
    return sum(seen[name] for name in PRODUCTS)


def compiled(step: Callable[..., Any], *given: object) -> tuple[list[Counter[str]], Any]:
    """The operations of the forward graph and, if there is one, of the backward graph, and what the step returned."""
    graphs: list[Counter[str]] = []

    def count(graph, _):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    out = torch.compile(step, fullgraph=True, backend=backend)(*given)
    if isinstance(out, Tensor):
        out.backward()
    return graphs, out


def derivative(network: nn.Module) -> None:
    """Twice the products of the network alone, in one graph."""
    z, v = torch.randn(2, 5, 3, 8, 8)
    t, r = torch.rand(2, 5)
    with Counting() as alone:
        network(z, r, t)
    with torch.no_grad():
        graphs, _ = compiled(velocity_and_derivative, network, z, r, t, v)
    assert products(alone.seen) > 8
    assert [products(seen) for seen in graphs] == [2 * products(alone.seen)]


def shared(network: nn.Module) -> None:
    """A step of one pass has one product a layer more than one of flow matching, and the same backward pass.

    Its loss and gradients are those of an eager step.
    """
    x, e = torch.randn(2, 5, 3, 8, 8)
    t = torch.rand(5)
    steps = []
    for ratio in (0.0, 0.4):
        loss = MeanFlowLoss(ratio=ratio, split="shared")
        step = functools.partial(lambda loss, r: loss.at(network, x, e, t, r)[0], loss, t * (1 - ratio))
        network.zero_grad()
        graphs, found = compiled(step)
        steps.append(graphs)
        torch.testing.assert_close(found, expected := step(), rtol=1e-7, atol=0)
        for p, gradient in zip(
            network.parameters(), torch.autograd.grad(expected, [*network.parameters()]), strict=True
        ):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-7)
    (plain, plain_backward), (forward, backward) = steps
    assert products(plain) > 8
    assert products(forward) == 2 * products(plain)
    names = {*PRODUCTS, "aten.convolution_backward.default", "aten.bmm.default"}
    counts = [{name: seen[name] for name in names} for seen in (plain_backward, backward)]
    assert sum(counts[0].values()) > 8
    assert counts[0] == counts[1]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    network = SMALL[sys.argv[1]]()
    for p in network.parameters():
        nn.init.normal_(p, std=0.1)
    derivative(network)
    shared(network)

"""Run in a process of its own: how many products a compiled derivative takes."""

import sys
from collections import Counter

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.meanflow.derivative import velocity_and_derivative
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.models.unet import UNet

PRODUCTS = ("aten.convolution.default", "aten.mm.default", "aten.addmm.default")
NETWORKS = {
    "unet": lambda: UNet(3, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,)),
    "song_unet": lambda: SongUNet(3, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,)),
    "dit": lambda: DiT(3, 8, patch_size=2, width=16, depth=2, heads=2),
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


def main(name: str) -> None:
    """Twice those of the network alone, in one graph."""
    network = NETWORKS[name]()
    z, v = torch.randn(2, 5, 3, 8, 8)
    t, r = torch.rand(2, 5)
    with Counting() as alone:
        network(z, r, t)
    graphs: list[Counter[str]] = []

    def count(graph, _):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return graph

    whole = torch.compile(velocity_and_derivative, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    with torch.no_grad():
        whole(network, z, r, t, v)
    assert products(alone.seen) > 8
    assert [products(seen) for seen in graphs] == [2 * products(alone.seen)]


if __name__ == "__main__":
    main(*sys.argv[1:])

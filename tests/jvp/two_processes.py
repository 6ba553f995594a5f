"""Derivatives on two processes, run with a rank and a store: mean gradients are those of one with all samples."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from fullstride.jvp import jvp, prepare
from tests.jvp import plain_ops


class Written(nn.LayerNorm):
    """A norm in elementary operations, since torch's gradient through its tangent is wrong."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return plain_ops.layer_norm(x, self.weight, self.bias)


class Scaled(nn.Module):
    """Scaling by a buffer, which DistributedDataParallel sends to all processes before each call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Buffer(torch.linspace(1, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Pair(nn.Module):
    """A network's output and tangent, to be wrapped as a whole."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return jvp(self.net, (x,), (v,), tangent_grad=True)


def network(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), norm(9), nn.GELU(), nn.Linear(9, 5), Scaled()).double()


def past(u: Tensor, du: Tensor) -> Tensor:
    """Loss of MeanFlow, to which the tangent is a constant."""
    return (u - du.detach()).square().mean()


def through(u: Tensor, du: Tensor) -> Tensor:
    """A loss with a gradient through the tangent."""
    return (u * du.sin()).mean()


def sharded(net: nn.Sequential) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in net:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def replicated(net: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(net)


def wrapped(net: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(Pair(net))


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def check(make: Callable[[nn.Sequential], nn.Module], loss: Callable[..., Tensor], tangent_grad: bool) -> None:
    """Two steps' gradients, prepared and not, against torch's on one process."""
    xs, vs = torch.randn(
        2, dist.get_world_size(), 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    alone = network(Written)
    for x, v in zip(xs, vs, strict=True):
        (loss(*torch.func.jvp(alone, (x,), (v,))) / len(xs)).backward()
    mine = xs[dist.get_rank()], vs[dist.get_rank()]
    for prepares in (False, True):
        net = network()
        if prepares:
            prepare(net)
        several = make(net)
        for _ in range(2):
            several.zero_grad()
            loss(*derived(several, *mine, tangent_grad)).backward()
        assert_close(gradients(net), gradients(alone), rtol=1e-9, atol=1e-12)


def derived(model: nn.Module, x: Tensor, v: Tensor, tangent_grad: bool) -> tuple[Tensor, ...]:
    if isinstance(model, DistributedDataParallel) and isinstance(model.module, Pair):
        return model(x, v)
    return jvp(model, (x,), (v,), tangent_grad=tangent_grad)


def refused() -> None:
    with pytest.raises(RuntimeError, match="module whose forward calls jvp"):
        check(replicated, through, tangent_grad=True)
    x = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(
        RuntimeError, match="a primal is a DTensor, which has no tangent in PyTorch; expected a torch.T"
    ):
        jvp(torch.sin, (x,), (x,))


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
    check(sharded, past, tangent_grad=False)
    check(sharded, through, tangent_grad=True)
    check(replicated, past, tangent_grad=False)
    check(wrapped, through, tangent_grad=True)
    refused()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's own end may meet a thread of gloo's, and abort

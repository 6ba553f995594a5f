"""Attention on two processes, run with a rank and a store: FSDP2, and context parallelism over the rows.

Values, tangents and gradients, through the tangent and past it, are those of one process with the whole batch.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from fullstride.jvp import attention, jvp
from tests.jvp import plain_ops
from tests.jvp.two_processes import gradients, past, through

ROWS, HEADS, WIDTH = 6, 2, 8


class Gathered(torch.autograd.Function):
    """All processes' rows, in order: its derivative gathers the tangents' rows, its gradient sums and cuts."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows = inputs[0].shape[1]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Gathered.apply(tangent)  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cut.apply(gradient, ctx.rows)  # pyright: ignore[reportReturnType]


class Cut(torch.autograd.Function):
    """Rows of one process, of the sum over processes."""

    @staticmethod
    def forward(x: Tensor, rows: int) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total[:, dist.get_rank() * rows :][:, :rows].contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed."""


class Block(nn.Module):
    """Causal attention with a residual; its rows are all, or those of one process."""

    def __init__(self, attend: Any, gather: Any = None):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend, self.gather = attend, gather

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        first = dist.get_rank() * x.shape[1] if self.gather else 0
        k, v = (self.gather(k), self.gather(v)) if self.gather else (k, v)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        mixed = self.attend(q, k, v, window=(-1, first))  # the triangle of these queries' places
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def net(attend: Any, gather: Any = None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(attend, gather), nn.GELU(), Block(attend, gather)).double()


def points() -> tuple[Tensor, Tensor]:
    x, v = torch.randn(2, 2, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    return x, v


def alone(loss: Any) -> tuple[nn.Module, Tensor, Tensor]:
    whole = net(plain_ops.attention)
    u, du = torch.func.jvp(whole, points()[:1], points()[1:])[:2]
    loss(u, du).backward()
    return whole, u.detach(), du.detach()


def check_sharded(loss: Any, tangent_grad: bool) -> None:
    """Parameters in shards, one sample a process: mean gradients."""
    mesh, several = init_device_mesh("cpu", (dist.get_world_size(),)), net(attention)
    for block in several:
        fully_shard(block, mesh=mesh)
    fully_shard(several, mesh=mesh)
    x, v = (y[dist.get_rank()][None] for y in points())
    whole, u, du = alone(loss)
    found = jvp(several, (x,), (v,), tangent_grad=tangent_grad)
    loss(*found).backward()
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    assert_close(tuple(found), (u[mine], du[mine]), rtol=1e-9, atol=1e-12)
    assert_close(gradients(several), gradients(whole), rtol=1e-9, atol=1e-12)


def check_context_parallel(loss: Any, tangent_grad: bool) -> None:
    """Rows of each sample on different processes, keys and values gathered: the gradients' mean is the whole's."""
    own = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    several, (x, v) = net(attention, Gathered.apply), (y[:, own].contiguous() for y in points())
    whole, u, du = alone(loss)
    found = jvp(several, (x,), (v,), tangent_grad=tangent_grad)
    loss(*found).backward()
    assert_close(tuple(found), (u[:, own], du[:, own]), rtol=1e-9, atol=1e-12)
    for parameter, expected in zip(several.parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        assert_close(parameter.grad / dist.get_world_size(), expected.grad, rtol=1e-9, atol=1e-12)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
    for check in (check_sharded, check_context_parallel):
        check(past, tangent_grad=False)
        check(through, tangent_grad=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's own end may meet a thread of gloo's, and abort

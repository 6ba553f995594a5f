"""Two processes, each with half of every batch: models in PyTorch's wrappers, and `processes=`, against one process."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fullstride.errors import ConfigError
from fullstride.step.torch import Accumulation, TrainStep
from fullstride.step.torch.distributed.join import of_ranks
from fullstride.step.torch.distributed.processes import SINGLE
from fullstride.step.torch.errors import StepError
from tests.step.torch.loops import (
    Words,
    adamw,
    mean_of_tokens,
    network,
    plain_sgd,
    regression,
    sparse,
    squared,
    tokens_of,
    words,
)


def wrapped(kind: str, model: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]) if kind == "fsdp2" else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if kind == "fsdp2" else model


def half(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every second sample, so that each process has sentences and tokens of its own count."""
    return {k: v[dist.get_rank() :: 2] for k, v in batch.items()}


def whole(model: nn.Module) -> list[Tensor]:
    given: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in given]


def clipped_by_a_loop(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of a hand-written loop around a wrapper, and of a step around it, in bf16."""
    ends = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        training = regression("cpu", lambda _: [])
        model = wrapped(kind, training.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = TrainStep(
            squared, model, optimizer, clip=0.2, precision="bf16", accumulate=2, backend="auto", log=lambda _: None
        )
        for batch in training.batches[:3]:
            if not by_hand:
                step(half(batch))
                continue
            optimizer.zero_grad()
            for part in ({k: v[s] for k, v in half(batch).items()} for s in (slice(0, 1), slice(1, 3))):
                with torch.autocast("cpu", torch.bfloat16):
                    value = squared(model, part) * len(part["x"]) / 3
                value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        ends.append(whole(model))
    return ends[0], ends[1]


def weighted(kind: str, weight: Any) -> tuple[list[Any], list[Any]]:
    """The weights, the loss and the number of tokens of one process with all samples, and of both by a step."""
    torch.manual_seed(0)
    training, alone = words("cpu", weight), Words()
    alone.load_state_dict(training.model.state_dict())
    model, plain = wrapped(kind, training.model), adamw(alone.parameters())
    processes = of_ranks(range(2), "cpu") if kind == "processes" else SINGLE
    step = TrainStep(
        training.loss,
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        accumulate=Accumulation(2, weight),
        processes=processes,
        backend="eager",
    )
    metrics: dict[str, Tensor] = {}
    value, count = torch.zeros(()), torch.zeros(())
    for batch in training.batches[:3]:
        plain.zero_grad()
        value, count = mean_of_tokens(alone, batch), tokens_of(batch)
        value.backward()
        plain.step()
        metrics = step(half(batch))
    step.end()
    found = [*whole(model), metrics["loss"], metrics.get("tokens", count.float())]
    return [*whole(alone), value.detach(), count.float()], found


def refusals() -> None:
    model = DistributedDataParallel(network("cpu"))
    optimizer = adamw(model.parameters())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"backend": "graph"}, "DistributedDataParallel meets other processes from the host"),
        ({"processes": of_ranks(range(2), "cpu")}, "DistributedDataParallel averages gradients already"),
    ]
    for options, told in cases:
        with pytest.raises(ConfigError, match=told):
            TrainStep(squared, model, optimizer, **options)
    training = sparse("cpu", plain_sgd)
    step = TrainStep(squared, training.model, training.optimizers, processes=of_ranks(range(2), "cpu"), backend="eager")
    with pytest.raises(StepError, match=r"0\.weight has a sparse gradient, .* or use backend=eager in one process"):
        step(training.batches[0])
    said = list[str]()
    plain = network("cpu")
    TrainStep(squared, plain, adamw(plain.parameters()), log=said.append, backend="eager")
    assert "has 2 processes, but neither processes= nor a wrapper of the Sequential averages" in said[0]


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for kind in ("ddp", "fsdp2"):
        found = clipped_by_a_loop(kind)
        rtol, atol = (1e-5, 1e-6) if kind == "ddp" else (0, 0)  # DDP sends the sum of micro-batches, and not each
        torch.testing.assert_close(*found, rtol=rtol, atol=atol)
    for kind in ("ddp", "fsdp2", "processes"):
        for weight in (tokens_of, "tokens"):
            torch.testing.assert_close(*weighted(kind, weight), rtol=1e-5, atol=1e-6)
    refusals()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

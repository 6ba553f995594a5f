"""Scenarios of test_distributed.py: torchrun runs them, one GPU per process; each leaves tensors in a folder."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.jvp import jvp, prepare
from fullstride.step.torch import BACKENDS, SINGLE, Averages, Processes, Shards, TrainStep, cosine, join_processes
from fullstride.step.torch import warmed_up as warmed
from fullstride.step.torch.distributed import buckets
from fullstride.step.torch.distributed.join import of_ranks

STEPS, SIZE = 9, 32
KINDS = ("ddp", "fsdp")
RECORDED = ("graph", "compile+graph")
EVERY = [*((backend, 1) for backend in BACKENDS), *((backend, 2) for backend in RECORDED)]
# Backend and micro-batches, by what gradients travel by.
CASES = {"copies": EVERY, "nccl": [case for case in EVERY if case[0] in ("eager", "compile+graph")]}


def network(seed: int) -> nn.Module:
    """A derivative through norms and products of odd widths, enough for several buckets."""
    torch.manual_seed(seed)
    layers = [nn.Linear(24, 133), nn.SiLU(), nn.LayerNorm(133), nn.Linear(133, 64), nn.SiLU(), nn.Linear(64, 24)]
    model = nn.Sequential(*layers).cuda()
    prepare(model)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A derivative in the target, as MeanFlow's."""
    u, du = jvp(model, (batch["x"].clone(),), (batch["v"].clone(),))
    error = (u - (batch["v"] - 0.3 * du).detach()).square()
    return error.mean(), {"mean": u.detach().mean()}


def batches() -> list[dict[str, Tensor]]:
    """Batches that are equal on every process."""
    g = torch.Generator("cuda").manual_seed(7)
    draw = lambda: torch.randn(SIZE, 24, generator=g, device="cuda")  # noqa: E731
    return [{"x": draw(), "v": draw()} for _ in range(STEPS)]


def make(kind: str, backend: str, processes: Processes, **options: Any) -> TrainStep:
    """Make a step of that kind; weights differ between processes before."""
    model = network(processes.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    averages = Averages(model, [0.9, 0.99], period=2)
    shared = Shards(model, optimizer, processes, averages) if kind == "fsdp" else None
    given: dict[str, Any] = {"clip": 0.5, "ema": averages, "schedule": warmed(cosine(40), 5), "accumulate": 2}
    given |= {"processes": processes, "shards": shared, "log": lambda _: None}
    return TrainStep(loss, model, optimizer, backend=backend, **given | options)


def left(step: TrainStep, metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Weights, averages and metrics."""
    found = {f"weight {name}": p.detach().clone() for name, p in step.body.model.named_parameters()}
    for decay in step.ema.models:
        with step.ema.whole(decay) as average:
            found |= {f"average {decay} {name}": p.clone() for name, p in average.named_parameters()}
    return found | {f"step {i} {name}": value for i, each in enumerate(metrics) for name, value in each.items()}


def steps(folder: Path, processes: Processes) -> None:
    """Run each backend's steps, distributed in both ways, with one micro-batch and with two."""
    for kind in KINDS:
        for backend, accumulate in CASES[processes.transfers]:
            torch._dynamo.reset()
            step = make(kind, backend, processes, accumulate=accumulate)
            made = [step({k: _own(v, accumulate, processes) for k, v in batch.items()}) for batch in batches()]
            name = f"{kind}-{backend}-{accumulate}-{processes.transfers}"
            _save(left(step, made) | _diagnostics(step), name, folder, processes)


def alone(folder: Path) -> None:
    """Train one process on all samples."""
    for accumulate in (1, 2):
        step = make("ddp", "eager", SINGLE, accumulate=accumulate)
        torch.save(left(step, [step(batch) for batch in batches()]), folder / f"alone-{accumulate}.pt")


def _own(whole: Tensor, accumulate: int, processes: Processes) -> Tensor:
    """Every n-th sample of each micro-batch."""
    return whole.unflatten(0, (accumulate, -1))[:, processes.rank :: processes.size].flatten(0, 1)


def _diagnostics(step: TrainStep) -> dict[str, Tensor]:
    reducer = step.body.reducer
    assert reducer is not None
    found = {"errors": max(step.errors.values()), "early": reducer.early, "buckets": reducer.buckets}
    return {name: torch.tensor(value) for name, value in found.items()}


def _save(found: dict[str, Tensor], name: str, folder: Path, processes: Processes) -> None:
    torch.save({k: v.cpu() for k, v in found.items()}, folder / f"{name}-{processes.rank}.pt")


def auto(folder: Path, processes: Processes) -> None:
    """All processes measure all backends and stay with the same."""
    step = make("fsdp", "auto", processes, accumulate=1)
    for _ in range(9):
        for batch in batches():
            step({k: _own(v, 1, processes) for k, v in batch.items()})
    (folder / f"auto-{processes.rank}.txt").write_text(step.backend)


def harm(folder: Path, processes: Processes) -> None:
    """One process's samples are not finite: the replayed step is skipped by all."""
    for kind in KINDS:
        guard = lambda value, _: ~value.isfinite()  # noqa: E731
        step = make(kind, "graph", processes, accumulate=1, guard=guard, check_first_step=False)
        good = {k: _own(v, 1, processes) for k, v in batches()[0].items()}
        for _ in range(6):
            step(good)
        before = left(step, [])
        step({k: v * (float("nan") if processes.rank else 1.0) for k, v in good.items()})
        same = all(torch.equal(a, b) for a, b in zip(before.values(), left(step, []).values(), strict=True))
        step(good)
        moved = not torch.equal(next(iter(before.values())), next(iter(left(step, []).values())))
        (folder / f"harm-{kind}-{processes.rank}.txt").write_text(f"{same} {moved}")


if __name__ == "__main__":
    buckets.BUCKET_BYTES = 4096
    place = Path(sys.argv[1])
    with join_processes("cuda", "copies") as together:
        if together.leads:
            alone(place)
        steps(place, of_ranks(range(together.size), "cuda", "nccl"))
        for act in (steps, auto, harm):
            act(place, together)

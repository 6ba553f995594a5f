"""Runs scenarios in processes that train together; run in a process of its own, from which they are forked."""

import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fullstride.errors import PeerError, Preempted
from fullstride.jvp import jvp, prepare
from fullstride.meanflow.config.schema import DataConfig, EvalConfig, GuardConfig, OptimizerConfig, TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation.evaluator import shared_evaluator
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.sampling.samplers import sample
from fullstride.meanflow.training import reporter, state, trainer
from fullstride.meanflow.training.batch_share import in_parts
from fullstride.meanflow.training.build import in_channels_last
from fullstride.meanflow.training.step import randomize_zero_layers
from fullstride.step.torch import Averages, Processes, Shards, TrainStep, join_processes
from fullstride.step.torch.distributed import buckets
from tests.meanflow.training.test_trainer import config


def settings(folder: Path, **kwargs) -> TrainConfig:
    """Everything random switched on, in 2 x 2 steps of 2 x 220 pictures, 55 of each half with r != t."""
    given = {"optimizer": OptimizerConfig(lr=1e-3, grad_clip=1.0), "distributed": "ddp"} | kwargs
    base = config(folder, **given)
    return replace(base, data=replace(base.data, batch_size=220), loss=replace(base.loss, meanflow_ratio=0.5))


def steps_of_meanflow(folder: Path, processes: Processes) -> None:
    """Three steps on one batch in fp64, and what they leave; the first one of ddp makes the buckets, others overlap."""
    buckets.BUCKET_BYTES = 4096
    for kind in ("ddp", "fsdp"):
        left = _steps(kind, processes)
        torch.save(left, folder / f"{kind}_{processes.rank}_of_{processes.size}.pt")


def _steps(kind: str, processes: Processes) -> dict[str, torch.Tensor]:
    torch.manual_seed(0 if processes.leads else 1)  # the weights become the first one's
    model = UNet(1, 8, channels=4, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[4]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    in_channels_last(model)
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2, fused=True)
    loss, averages = MeanFlowLoss(ratio=0.5, split="shared"), Averages(model, [0.5])
    shards = Shards(model, optimizer, processes, averages) if kind == "fsdp" else None
    step = TrainStep(
        lambda network, batch: loss.at(network, **batch),
        model,
        optimizer,
        ema=averages,
        accumulate=2,
        clip=1.0,
        backend="eager",
        processes=processes,
        shards=shards,
    )
    metrics = [step(_own_batch(loss, processes)) for _ in range(3)]
    left = _gradients(model, shards)
    left |= {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    with averages.whole(0.5) as average:
        left |= {f"average {name}": p.clone() for name, p in average.named_parameters()}
    left |= {f"step {i} {name}": value for i, each in enumerate(metrics) for name, value in each.items()}
    assert step.body.reducer is None or step.body.reducer.buckets > 3
    return left


def _groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices alone, as is usual."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def _gradients(model: torch.nn.Module, shards: Shards | None) -> dict[str, torch.Tensor]:
    if shards is None:
        return {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    names, found = {p: name for name, p in model.named_parameters()}, {}
    for shard in shards.shards:
        assert shard.own.grad is not None
        whole = shard.gathered(shard.own.grad)
        found |= {f"gradient {names[p]}": g.clone() for p, g in zip(shard.parameters, whole, strict=True)}
    return found


def _own_batch(loss: MeanFlowLoss, processes: Processes) -> dict[str, torch.Tensor]:
    """One process's share of two micro-batches of eight."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(16, 1, 8, 8, generator=random, dtype=torch.float64)
    halves = [loss.draw(half, random) for half in x.split(8)]
    e, t, r = (torch.cat(parts) for parts in zip(*halves, strict=True))
    whole = {"x": x, "e": e, "t": t, "r": r}
    own = slice(processes.rank, None, processes.size)
    return {name: value.unflatten(0, (2, 8))[:, own].flatten(0, 1) for name, value in whole.items()}


def compiled_steps(folder: Path, processes: Processes) -> None:
    """Steps whose gradients are sent from within a compiled backward pass, with a derivative in it."""
    buckets.BUCKET_BYTES = 512
    for kind in ("none", "ddp", "fsdp"):
        torch.manual_seed(processes.rank)
        model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.SiLU(), torch.nn.Linear(33, 6))
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        shards = Shards(model, optimizer, processes) if kind == "fsdp" else None
        alone: dict[str, Any] = {"backend": "eager"}
        given: dict[str, Any] = {"processes": processes, "shards": shards, "backend": "compile"}
        step = TrainStep(_derived, model, optimizer, **(given if kind != "none" else alone))
        own = slice(0, None) if kind == "none" else slice(processes.rank, None, processes.size)
        random = torch.Generator().manual_seed(3)
        for _ in range(3):
            step(torch.randn(8, 2, 6, generator=random)[own])
        reducer = step.body.reducer
        early = (reducer.early, reducer.buckets) if reducer is not None else ()
        if processes.leads or kind != "none":
            torch.save([early, list(model.parameters())], folder / f"{kind}_{processes.rank}.pt")


def _derived(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x, v = batch.unbind(1)
    u, dudt = jvp(model, (x.clone(),), (v.clone(),))
    return (u - (v - 0.3 * dudt).detach()).square().mean()


def images(folder: Path, processes: Processes) -> None:
    """Samples and their scores, a part by each."""
    torch.manual_seed(0)
    model = UNet(1, 8, channels=4, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[], num_classes=10)
    randomize_zero_layers(model, torch.Generator().manual_seed(0))
    chosen = {"sampler": "meanflow", "steps": 2, "shape": (1, 8, 8), "seed": 3, "num_classes": 10, "batch_size": 3}
    result = in_parts(lambda own: sample(model, num=len(own), start=own.start, **chosen), 7, processes)
    assert (result is None) == (not processes.leads)
    evaluator = shared_evaluator(load_data(DataConfig()), EvalConfig(51), torch.device("cpu"), processes)
    assert evaluator is not None
    scores = evaluator.meanflow_scores(model, 10)
    if result is not None:
        torch.save([result.images, scores], folder / f"images_of_{processes.size}.pt")
    with pytest.raises(ZeroDivisionError if processes.rank else PeerError if processes.size > 1 else AssertionError):
        processes.agreed(lambda: 1 / 0 if processes.rank else _require(processes.size > 1))


def _require(true: bool) -> None:
    assert true


def runs_with_a_break(folder: Path, processes: Processes) -> None:
    """Runs straight on, and the same ones in two parts of which the first is stopped in mid-epoch."""
    if not processes.leads:
        for module, name in ((state, "write_checkpoint"), (trainer, "write_config"), (reporter, "MetricsLog")):
            setattr(module, name, _forbidden)
    for kind in ("ddp", "fsdp"):
        chosen = functools.partial(settings, epochs=2, distributed=kind)
        scored = chosen(folder / f"{kind} straight", eval_every=2, evaluation=EvalConfig(64))
        trainer.Trainer(scored, processes).run_to_end()
        stopped = trainer.Trainer(chosen(folder / f"{kind} broken"), processes)
        stopped._step = _stopping(stopped, stopped._step, rank=1)
        with pytest.raises(Preempted, match="step_00000003"):
            stopped.run_to_end()
        trainer.Trainer(chosen(folder / f"{kind} broken", resume=True), processes).run_to_end()


def _stopping(stopped: trainer.Trainer, step: Callable, rank: int) -> Callable:
    """The signal comes to one of the processes alone."""

    def interrupted(raw: torch.Tensor, labels: torch.Tensor) -> dict:
        metrics = step(raw, labels)
        if stopped.state.position.step == 2 and stopped.processes.rank == rank:
            signal.raise_signal(signal.SIGTERM)
        return metrics

    return interrupted


def _forbidden(*_: object) -> None:
    raise AssertionError("only the first process writes")


def harmful_steps(folder: Path, processes: Processes) -> None:
    """One process alone meets what is not finite: all return to the same checkpoint, and give up together."""
    guard = GuardConfig(check_tangents=False, check_step=False, max_skips=2, max_rollbacks=1)
    run = trainer.Trainer(settings(folder, guard=guard, epochs=9), processes)
    forward = run.objective

    def wrong(model: torch.nn.Module, drawn: dict) -> tuple:
        loss, metrics = forward(model, drawn)
        return loss * (float("nan") if processes.rank and run.state.position.step >= 2 else 1.0), metrics

    run.step.body = replace(run.step.body, loss=wrong)
    run.step._choose("eager")
    try:
        run.run_to_end()
    except FloatingPointError as error:
        kept = {name: p.sum().item() for name, p in run.state.model.named_parameters()}
        (folder / f"{processes.rank}.json").write_text(json.dumps([str(error), kept]))


def measured_steps(folder: Path, processes: Processes) -> None:
    """`auto`, where the compiler of one process alone fails."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and not processes.leads:
            raise RuntimeError("out of something")
        return model(batch).square().mean()

    torch.manual_seed(0)
    model, said = torch.nn.Linear(4, 1), list[str]()
    optimizer = torch.optim.SGD(model.parameters())
    step = TrainStep(loss, model, optimizer, backend="auto", processes=processes, log=said.append)
    numbers = [step(torch.randn(8, 4))["loss"].item() for _ in range(34)]
    found = {"backend": step.backend, "said": said, "numbers": numbers, "weights": model.weight.tolist()}
    (folder / f"{processes.rank}.json").write_text(json.dumps(found))


SCENARIOS = {
    act.__name__: act
    for act in (steps_of_meanflow, compiled_steps, images, runs_with_a_break, harmful_steps, measured_steps)
}


# What is compared with one process.
ALONE_TOO = {"steps_of_meanflow", "images"}


def _fork(act: Callable[[Path, Processes], None], folder: Path, rank: int, size: int, port: int) -> int:
    if pid := os.fork():
        return pid
    given = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in given.items()}
    with join_processes() as processes:
        act(folder, processes)
    sys.stdout.flush()
    os._exit(0)


def run(name: str, folder: Path, size: int) -> None:
    """Run a scenario in `size` processes, which leave what they have to say in the folder of its name.

    Raises:
        AssertionError: if one of them fails.

    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (own := folder / name).mkdir(exist_ok=True)
    pids = [_fork(SCENARIOS[name], own, rank, size, port) for rank in range(size)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in SCENARIOS:
        for number in (1, 2) if scenario in ALONE_TOO else (2,):
            run(scenario, Path(sys.argv[1]), number)

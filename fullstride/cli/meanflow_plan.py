"""`fullstride meanflow plan`."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullstride.cli.moved import benchmarks_command
from fullstride.errors import ConfigError
from fullstride.meanflow.planning.cost import duration

if TYPE_CHECKING:
    from rich.table import Table

    from fullstride.meanflow.config.schema import TrainConfig
    from fullstride.meanflow.planning.fit import FittedCosts
    from fullstride.meanflow.planning.plan import Machine, RunPlan

# The papers' runs, in 16 bits; the first as long as its paper's.
PUBLISHED = {
    "CIFAR-10, 800,000 steps": (["preset=cifar10_v1", "precision=bf16"], 800_000),
    "ImageNet 256, DiT-B/4": (["preset=imagenet256_b4", "precision=bf16"], None),
    "ImageNet 256, DiT-XL/2": (["preset=imagenet256_xl2", "precision=bf16"], None),
}
ROW_MAJOR = "  planned with channels_last=true, like all measured convolutions; without it steps are slower"
WIDTH = 140  # so that no name is cut if the output is a file
COLUMNS = ("run", "weights", "batch", "GPUs", "ms a step", "images/s", "GiB", "steps", "epoch", "first save", "in all")


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings as for train, e.g. preset=cifar10_v1; by default the papers' runs."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs that share each step.")] = 1,
    link_gbs: Annotated[
        float, typer.Option(min=0, help="Link bandwidth in GB/s, sending and receiving at once; for several GPUs.")
    ] = 0.0,
    tflops: Annotated[
        float,
        typer.Option(min=0, help="TFLOP/s of a large matrix product in the run's precision; by default an H200's."),
    ] = 0.0,
    tbs: Annotated[
        float, typer.Option(min=0, help="TB/s of a large copy, read plus written; by default an H200's.")
    ] = 0.0,
    memory_gib: Annotated[float, typer.Option(min=0, help="Memory of one GPU; by default an H200's.")] = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of optimizer steps; by default those of the epochs.")
    ] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Size of the training half, if it differs.")] = None,
    fit: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Refit the factors to these results, and store them.")
    ] = None,
) -> None:
    """Predict a run: a step's time and memory, and the run's times, from counted work and measured rates."""
    from rich.console import Console

    from fullstride.meanflow.planning.fit import fitted

    if fit is not None:
        _refit(fit)
    kept = fitted()
    machine = _machine(kept, gpus, link_gbs, tflops, tbs, memory_gib)
    plans = _plans(overrides or [], machine, kept, steps, records)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_table(plans, machine))
    for name, made in plans.items():
        every = made.parts | ({"all-reduce": made.reduce_ms} if made.reduce_ms else {})
        parts = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in every.items() if ms >= 0.05)
        console.print(f"{name}: {parts}", highlight=False, markup=False, soft_wrap=True)
        if made.config.model.convolutional and not made.config.channels_last:
            console.print(ROW_MAJOR, highlight=False, markup=False, soft_wrap=True)
        if made.memory > machine.memory:
            console.print(_too_large(made, machine, kept), highlight=False, markup=False, soft_wrap=True)


def _refit(results: Path) -> None:
    """Let the benchmarks fit the factors, which they know the results for."""
    command, environment = benchmarks_command("meanflow plan --fit", ["fit-plan", str(results)])
    if code := subprocess.run(command, env=environment).returncode:
        raise typer.Exit(code)


def _machine(kept: "FittedCosts", gpus: int, link: float, tflops: float, tbs: float, memory: float) -> "Machine":
    from fullstride.meanflow.planning.cost import Rates
    from fullstride.meanflow.planning.plan import Machine

    if bool(tflops) != bool(tbs):
        raise ConfigError("--tflops and --tbs: one is given, expected both or neither; a benchmark measures them")
    rates = {p: Rates(tflops * 1e12, tbs * 1e12) for p in kept.rates} if tflops else kept.rates
    return Machine(rates, int(memory * 2**30) or kept.memory_bytes, gpus, link * 1e9)


def _plans(
    overrides: list[str], machine: "Machine", kept: "FittedCosts", steps: int | None, records: int | None
) -> "dict[str, RunPlan]":
    from fullstride.meanflow.planning.plan import make_plan

    asked = {"this run": (overrides, steps)} if overrides else PUBLISHED
    return {
        name: make_plan(_config(given), machine, kept.costs, steps or wanted, records)
        for name, (given, wanted) in asked.items()
    }


def _config(overrides: list[str]) -> "TrainConfig":
    """Return a configuration whose data need not exist: of a row that knows its records, a path is read if given."""
    from fullstride.meanflow.config.datasets import row_of
    from fullstride.meanflow.config.overrides import read, validate

    config = read(overrides)
    row, path = row_of(config.data.name), config.data.path
    if row.folder and row.records:
        config.data.path = path or "."
    validate(config)
    config.data.path = path
    return config


def published() -> "dict[str, RunPlan]":
    """Plan the papers' runs on one GPU of the machine that the factors were fitted on."""
    from fullstride.meanflow.planning.fit import fitted

    kept = fitted()
    return _plans([], _machine(kept, 1, 0.0, 0.0, 0.0, 0.0), kept, None, None)


def cells(name: str, plan: "RunPlan") -> tuple[str, ...]:
    """Return a row of the table: `COLUMNS`; GiB are per GPU."""
    s = plan.step
    batch = f"{s.accumulate} x {s.batch * plan.gpus}" if s.accumulate > 1 else str(s.batch * plan.gpus)
    return (
        name,
        f"{plan.work.parameters / 1e6:.1f}M",
        batch,
        str(plan.gpus),
        f"{plan.ms:.1f}",
        f"{plan.images_a_second:,.0f}",
        f"{plan.memory / 2**30:.1f}",
        f"{plan.steps:,}",
        *map(duration, (plan.epoch_seconds, plan.first_save_seconds, plan.seconds)),
    )


def _table(plans: "dict[str, RunPlan]", machine: "Machine") -> "Table":
    from rich import box
    from rich.table import Table

    used = {plan.step.precision for plan in plans.values()}
    rates = ", ".join(f"{p} {machine.rates[p].flops / 1e12:.3g} TFLOP/s" for p in sorted(used))
    copy = next(iter(machine.rates.values())).bytes / 1e12
    caption = f"predicted for captured and compiled steps at {rates}, {copy:.3g} TB/s; without evaluation and saves"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0)
    for name, plan in plans.items():
        table.add_row(*cells(name, plan))
    return table


def _too_large(plan: "RunPlan", machine: "Machine", kept: "FittedCosts") -> str:
    from fullstride.meanflow.planning.plan import largest_batch

    fits = largest_batch(plan, machine.memory, kept.costs)
    remedy = f"{fits} samples fit at once; accumulate, or use more GPUs" if fits else "not one sample fits"
    return f"  {plan.memory / 2**30:.1f} GiB on a GPU of {machine.memory / 2**30:.1f} GiB: {remedy}"

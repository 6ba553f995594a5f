"""Sweeps: one run after another, each with its own name; a failed run does not stop the others."""

from dataclasses import dataclass
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fullstride.errors import ConfigError, OutOfMemory
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.training.outcome import last_error, not_finite
from fullstride.meanflow.training.trainer import train
from fullstride.runs.folder import read_metrics

# A squared error of an element that no run which learns has: data have about unit variance, as have velocities.
FAR_OFF = 1e3
ADVICE = "lower optimizer.lr, or set optimizer.grad_clip=1"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run of a sweep; one that diverged has both a folder and an error."""

    name: str
    run: Path | None
    error: str = ""


def run_all(runs: list[list[str]]) -> None:
    """Train every run of a sweep and print a table of how they ended.

    Raises:
        ConfigError: before anything runs, if any of them has settings that cannot be.
        typer.Exit: with code 1, after all have ended, if any failed or diverged.

    """
    configs = [compose(overrides) for overrides in runs]
    outcomes = []
    for i, config in enumerate(configs):
        typer.echo(f"run {i + 1} of {len(configs)}: {config.run_name}")
        try:
            run = train(config)
        except (ConfigError, FloatingPointError, OutOfMemory, OSError, RuntimeError) as error:
            typer.echo(f"{config.run_name}: {error}", err=True)
            outcomes.append(Outcome(config.run_name, None, str(error) or type(error).__name__))
            continue
        if why := diverged(run):
            typer.echo(f"{config.run_name}: diverged: {why}; {ADVICE}", err=True)
        outcomes.append(Outcome(config.run_name, run, why))
    Console().print(_table(outcomes))
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def diverged(run: Path) -> str:
    """Return why a finished run has diverged, or ""."""
    if why := not_finite(run):
        return why
    error = last_error(run) or 0.0
    return f"its last squared error is {error:.3g}, of data of unit scale" if error > FAR_OFF else ""


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="sweep", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("run", "steps", "squared error", "energy distance, 1 step"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        table.add_row(escape(outcome.name), *(_last(outcome.run) if outcome.run else ("failed", "", "")))
    return table


def _last(run: Path) -> tuple[str, str, str]:
    lines = read_metrics(run)
    trained = [line for line in lines if "squared_error" in line]
    scored = [line["evaluation"] for line in lines if "evaluation" in line]
    energy = scored[-1].get("meanflow 1", {}).get("energy_distance") if scored else None
    error = trained[-1]["squared_error"] if trained else None  # null where it was no number
    return (
        str(trained[-1]["step"]) if trained else "0",
        ("not finite" if trained else "") if error is None else f"{error:.4f}",
        "" if energy is None else f"{energy:.4f}",
    )

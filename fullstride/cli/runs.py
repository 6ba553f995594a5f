"""`fullstride runs ...`: the folders of training runs, how they ended, their settings and numbers, their removal."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from fullstride.cli.help import App
from fullstride.errors import ConfigError

if TYPE_CHECKING:
    from fullstride.runs.survey import RunSummary

app = App("List, compare or remove the folders of training runs.", {"Commands": "list show compare clean"})

Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="FOLDER", help="Runs, or folders with runs in them; runs if absent.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
MISSING = "-"
ITS_OWN = {"output_dir", "overwrite", "resume", "run_name"}  # settings that say nothing of what was trained


def _found(folders: list[Path] | None) -> "list[RunSummary]":
    from fullstride.runs.survey import runs_in, summary

    return [summary(run) for run in runs_in(folders or [Path("runs")])]


def _as_json(found: "RunSummary") -> dict[str, Any]:
    return asdict(found) | {"folder": str(found.folder)}


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else MISSING if value is None else str(value)


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Format rows as columns; the last one may be of any length, and nothing is cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(run: "RunSummary") -> list[str]:
    from fullstride.assets.cache import age

    steps = f"{run.step:,}" + (f"/{run.steps:,}" if run.steps else "")
    state = run.state + (f" ({run.exit_code})" if run.exit_code else "")
    loss = _number(run.metrics.get("loss"))
    kind = run.workload or MISSING
    return [str(run.folder), kind, state, steps, loss, decimal(run.size), age(run.changed), run.why]


HEAD = ["run", "kind", "state", "step", "loss", "size", "age", "why it ended"]


@app.command("list")
def show_all(folders: Folders = None, as_json: AsJson = False) -> None:
    """List runs: state with its exit code, step, last loss, size, age, and why it ended."""
    found = _found(folders)
    if as_json:
        typer.echo(json.dumps([_as_json(run) for run in found], indent=2))
        return
    for line in _aligned([HEAD, *map(_row, found)]) if found else ["no runs"]:
        typer.echo(line)


@app.command("show")
def show_one(run: Annotated[Path, typer.Argument(help="Folder of a run.")], as_json: AsJson = False) -> None:
    """Show a run: its state, its last numbers, its last evaluation."""
    found = _only([run])[0]
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
        return
    from fullstride.settings.overrides import flat

    typer.echo("\n".join(_aligned([list(pair) for pair in zip(HEAD, _row(found), strict=True)])))
    for title, values in (("last numbers", found.metrics), ("last evaluation", found.evaluation)):
        if rows := [[f"  {name}", _number(value)] for name, value in flat(values)]:
            typer.echo("\n".join([f"{title}:", *_aligned(rows)]))


def _only(runs: list[Path]) -> "list[RunSummary]":
    """Summaries of folders that have to be runs themselves."""
    from fullstride.runs.folder import run_config
    from fullstride.runs.survey import summary

    for run in runs:
        if not run_config(run):
            raise ConfigError(f"{run}: no run; expected a folder that `fullstride runs list` names")
    return [summary(run) for run in runs]


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two folders of runs or more.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings that differ, the state, and the last numbers of each."""
    from fullstride.runs.folder import run_config
    from fullstride.settings.overrides import flat

    found = _only(runs)
    settings = [{k: v for k, v in flat(run_config(run.folder)) if k not in ITS_OWN} for run in found]
    numbers = [{"state": run.state, **run.metrics, **dict(flat(run.evaluation))} for run in found]
    rows = [row for row in _side_by_side(settings) if any(value != row[1] for value in row[2:])]
    measured = _side_by_side(numbers)
    if as_json:
        names = [str(run.folder) for run in found]
        told = {
            title: {name: dict(zip(names, values, strict=True)) for name, *values in part}
            for title, part in (("settings", rows), ("metrics", measured))
        }
        typer.echo(json.dumps(told, indent=2))
        return
    table = [["", *(str(run.folder) for run in found)], *rows, *measured]
    for line in _aligned([[_number(cell) for cell in row] for row in table]):
        typer.echo(line)


def _side_by_side(each: list[dict[str, Any]]) -> list[list[Any]]:
    """Rows of a name and its value in each mapping, None where it has none."""
    names = dict.fromkeys(name for values in each for name in values)
    return [[name, *(values.get(name) for values in each)] for name in names]


@app.command()
def clean(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Runs, or folders with runs in them.")],
    state: Annotated[list[str] | None, typer.Option(help="Only runs in this state; repeat for several.")] = None,
    older_than: Annotated[float, typer.Option(min=0, help="Only runs without news for so many days.")] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove them; without it nothing is removed.")] = False,
) -> None:
    """Show which runs would be removed, and remove them with --yes; one that is running never is."""
    from fullstride.errors import one_of
    from fullstride.runs.state import STATES
    from fullstride.runs.survey import is_older, remove_run

    for name in state or ():
        one_of("--state", name, (*STATES[1:], "unknown"))
    chosen = [run for run in _found(folders) if is_older(run, older_than) and (not state or run.state in state)]
    removable = [run for run in chosen if run.state != "running"]
    for line in _aligned([HEAD, *map(_row, removable)]) if removable else ["nothing to remove"]:
        typer.echo(line)
    if kept := len(chosen) - len(removable):
        typer.echo(f"{kept} running, which are left alone")
    size = decimal(sum(run.size for run in removable))
    if not yes:
        if removable:
            typer.echo(f"nothing is removed yet; --yes removes these {len(removable)} runs and frees {size}")
        return
    for run in removable:
        remove_run(run.folder)
    typer.echo(f"freed {size}")

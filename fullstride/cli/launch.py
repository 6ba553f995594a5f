"""Commands `fullstride launch`: run a command on another machine, and fetch its results from Modal's volumes."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from fullstride.cli.from_dataclass import command_from, sections_of
from fullstride.cli.help import App, HelpGroup
from fullstride.errors import one_of
from fullstride.launch.request import LAUNCHERS, Request
from fullstride.launch.words import check_command, renamed


class BackendByOption(HelpGroup):
    """Group whose commands may also be named by the older `--backend NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the backend's name first, and say so."""
        if args[:1] == ["run"]:
            args = args[1:]
        if args[:1] != ["--help"] and args and args[0].startswith("-"):
            args = _by_name(args)
        return super().parse_args(ctx, args)


def _by_name(args: list[str]) -> list[str]:
    for i, word in enumerate(args[: args.index("--") if "--" in args else None]):
        option, equals, value = word.partition("=")
        if option == "--backend" and (equals or len(args) > i + 1):
            backend = value if equals else args[i + 1]
            one_of("--backend", backend, LAUNCHERS)
            typer.echo(f"fullstride launch --backend {backend} is now: fullstride launch {backend}", err=True)
            return [backend, *args[:i], *args[i + (1 if equals else 2) :]]
    return args


app = App(
    "Run a command of fullstride on other machines.\n\n"
    "For example: fullstride launch modal --gpu H100 -- meanflow train epochs=20",
    {"Backends": " ".join(LAUNCHERS), "Modal's volumes": "sync ckpts"},
    cls=BackendByOption,
)

RunName = Annotated[str | None, typer.Option("--run", help="Name of one run; all by default.")]
Volume = Annotated[str, typer.Option(help="Name of the Modal volume of runs.")]


def _launch(
    request: Request,
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="Command as after `fullstride`: meanflow train epochs=20.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the job without submitting it.")] = False,
) -> None:
    new = renamed(words)
    if new != words:
        typer.echo(f"{words[0]} is now: {' '.join(new[: len(new) - len(words) + 1])}", err=True)
    check_command(new, request.all_processes)
    # Its package is imported here, and only here.
    plan = importlib.import_module(f"fullstride.launch.{LAUNCHERS[request.backend][1]}").plan(request, new)
    if dry_run or request.backend not in ("local", "torchrun"):
        typer.echo(plan.text)
    if not dry_run:
        raise typer.Exit(plan.submit())


for _name, (_options, _) in LAUNCHERS.items():
    _sections = sections_of(_options)
    app.command(
        _name,
        context_settings={"allow_interspersed_args": False},
        sections=_sections | {"Job": f"dry_run {_sections['Job']}"},
        epilog="Each further attempt resumes the run (resume=true); exit codes decide whether there is one.",
    )(command_from(_launch, _options))


@app.command()
def sync(
    run: RunName = None,
    volume: Volume = "fullstride-runs",
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
    tracking: Annotated[
        Path | None, typer.Option(help="Folder to fetch the trackers' files into, such as TRACKIO_DIR's.")
    ] = None,
    tracking_volume: Annotated[
        str, typer.Option(help="Name of the Modal volume of the trackers' files.")
    ] = "fullstride-tracking",
) -> None:
    """Fetch runs from Modal: checkpoints, metrics, ends; only what is new."""
    import modal

    from fullstride.launch import modal_volume

    for name, folder, part in ((volume, out, run), (tracking_volume, tracking, None)):
        if folder is not None:
            files, size = modal_volume.sync(modal.Volume.from_name(name), name, folder, part)
            typer.echo(f"{name} -> {folder}: {files} files, {size / 2**20:.1f} MiB")


@app.command()
def ckpts(run: RunName = None, volume: Volume = "fullstride-runs") -> None:
    """List the checkpoints on Modal's volume."""
    import modal

    from fullstride.launch import modal_volume

    found = modal_volume.checkpoints_on(modal.Volume.from_name(volume), run)
    typer.echo("\n".join(modal_volume.lines_of(found)) or f"no checkpoints on {volume}")

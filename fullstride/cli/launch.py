"""`fullstride launch`: a command of this package on another machine, and what it has left on Modal's volumes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fullstride.cli.help import App, HelpGroup
from fullstride.launch.request import BACKENDS, Request, check
from fullstride.launch.words import check_command, renamed

VERBS = ("sync", "ckpts")


class RunUnlessNamed(HelpGroup):
    """A group whose first command need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what begins with no verb for options and command of `run`."""
        if args and args[0] not in (*VERBS, "run", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = App(
    "Run a command of fullstride on other machines.\n\n"
    "For example: fullstride launch --backend modal -- meanflow train epochs=20",
    cls=RunUnlessNamed,
)

Name = Annotated[str, typer.Option(help="Of the job: lower-case letters, digits and -.")]
RunName = Annotated[str | None, typer.Option("--run", help="One run alone; all unless given.")]
Volume = Annotated[str, typer.Option(help="Modal's volume of runs.")]


def _plan(request: Request, words: list[str]) -> Any:
    """The backend's plan; its package is imported here, and only here."""
    if request.backend in ("local", "torchrun"):
        from fullstride.launch.local import plan_local, plan_torchrun

        return (plan_local if request.backend == "local" else plan_torchrun)(request, words)
    if request.backend == "slurm":
        from fullstride.launch.slurm import plan
    elif request.backend == "modal":
        from fullstride.launch.modal_app import plan
    else:
        from fullstride.launch.skypilot import plan
    return plan(request, words)


@app.command(
    context_settings={"allow_interspersed_args": False},
    sections={
        "Job": "backend dry_run name retries retry_delay time",
        "Machines": "processes gpus gpu nodes cpus memory",
        "Slurm": "partition account qos constraint sbatch cluster",
        "Modal and SkyPilot": "image pip runs volume secret detach spot",
        "Slurm and SkyPilot": "setup folder",
    },
)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="As after `fullstride`: meanflow train epochs=20.")
    ],
    backend: Annotated[str, typer.Option(metavar="|".join(BACKENDS), help="Where it runs.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be submitted, and submit nothing.")
    ] = False,
    name: Name = "fullstride",
    retries: Annotated[int | None, typer.Option(help="Attempts after the first; 5 unless given.")] = None,
    retry_delay: Annotated[
        float | None, typer.Option(help="Seconds before each; 30 unless given, none where torchrun makes them.")
    ] = None,
    time: Annotated[
        float | None, typer.Option(help="Hours of an attempt; 12 unless given, here no limit.", show_default=False)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="torchrun, or slurm with --gpus 0: how many on a machine; 1 unless given.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Of each machine, one process each; 1 unless given.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="KIND", help="Such as H100, as the backend calls it.")] = None,
    nodes: Annotated[int | None, typer.Option(help="slurm, skypilot: machines.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each machine.")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of each machine.")] = None,
    partition: Annotated[str | None, typer.Option(help="Where the job queues.")] = None,
    account: Annotated[str | None, typer.Option(help="What the job is charged to.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features of the machines.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Another flag of sbatch's.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="slurm|local", help="local runs jobs here, by submitit.")
    ] = None,
    setup: Annotated[list[str] | None, typer.Option(metavar="LINE", help="Shell command to run beforehand.")] = None,
    folder: Annotated[str | None, typer.Option(help="For job files; runs/launch unless given.")] = None,
    image: Annotated[str | None, typer.Option(help="modal, skypilot: a container image of a registry.")] = None,
    pip: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="modal, skypilot: install it, too.")] = None,
    volume: Annotated[list[str] | None, typer.Option(metavar="NAME:/PATH", help="modal: mount it, too.")] = None,
    runs: Annotated[str | None, typer.Option(help="modal, skypilot: volume or bucket of runs.")] = None,
    secret: Annotated[list[str] | None, typer.Option(metavar="NAME", help="modal: one of its secrets.")] = None,
    detach: Annotated[
        bool | None, typer.Option("--detach/--no-detach", help="modal: go on without this command, as by default.")
    ] = None,
    spot: Annotated[bool | None, typer.Option("--spot/--no-spot", help="skypilot: machines that may go.")] = None,
) -> None:
    """Run a command on another machine.

    What an attempt leaves undone the next one goes on with (resume=true); exit codes say whether there is one.
    """
    repeated = {"setup": setup, "sbatch": sbatch, "pip": pip, "volume": volume, "secret": secret}
    request = Request(
        backend=backend,
        name=name,
        retries=retries,
        retry_delay=retry_delay,
        time=time,
        processes=processes,
        gpus=gpus,
        gpu=gpu,
        nodes=nodes,
        cpus=cpus,
        memory=memory,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        cluster=cluster,
        folder=folder,
        image=image,
        runs=runs,
        detach=detach,
        spot=spot,
        **{key: tuple(values or ()) for key, values in repeated.items()},
    )
    plan = _prepared(request, command)
    if dry_run or backend not in ("local", "torchrun"):
        typer.echo(plan.text)
    if dry_run:
        return
    raise typer.Exit(plan.submit())


def _prepared(request: Request, words: list[str]) -> Any:
    check(request)
    new = renamed(words)
    if new != words:
        typer.echo(f"{words[0]} is now: {' '.join(new[: len(new) - len(words) + 1])}", err=True)
    check_command(new, request.all_processes)
    return _plan(request, new)


@app.command()
def sync(
    run: RunName = None,
    volume: Volume = "fullstride-runs",
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
    tracking: Annotated[
        Path | None, typer.Option(help="Also the trackers' files, into this folder, which TRACKIO_DIR may name.")
    ] = None,
    tracking_volume: Annotated[
        str, typer.Option(help="Modal's volume of the trackers' files.")
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

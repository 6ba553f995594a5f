"""Option `--gpus 0,1` of `python -m benchmarks`: trainings as processes on the GPUs before the result is built."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.harness.time_limit import Limit
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note

if TYPE_CHECKING:
    from benchmarks.experiments.gpu_pool import Task

Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="GPUs of this machine for the trainings: one process on each, with its share of the cores.",
    ),
]
SharedGpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="GPUs of this machine for the trainings: one process on each, with its share of the cores; "
        "a GPU that is named twice, as in 0,0, runs two at a time.",
    ),
]


def words_of(**given: Any) -> list[str]:
    """Return a command's options as arguments: `--name value`, once per item of a sequence, none for None."""
    words = []
    for name, value in given.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        words += [word for one in values if one is not None for word in (f"--{name}", str(one))]
    return words


def spread(
    gpus: str, tasks: "Sequence[Task]", runs: Path, collect: bool, limit: Limit, *, device: str, shared: bool = False
) -> None:
    """Run commands of `python -m benchmarks` on the GPUs, and return once all of them have ended.

    Args:
        gpus: value of the option.
        tasks: the commands; their logs are in `runs/logs`.
        runs: the folder of runs.
        collect: whether --collect was given.
        limit: time limit of the whole.
        device: device of the trainings, from their settings.
        shared: whether several may share a GPU, because none has a time budget.

    Raises:
        ConfigError: if GPUs are invalid or absent, or --collect is given, too.
        PeerError: if a command failed, after the others have ended.
        Preempted, KeyboardInterrupt: if this process received a stop signal, after all commands have ended.

    """
    from benchmarks.experiments.gpu_pool import run_side_by_side
    from benchmarks.experiments.visible_gpus import gpus_of

    if collect:
        raise ConfigError(f"--gpus {gpus} --collect: --collect runs nothing; remove one of the two")
    found = gpus_of(gpus, shared)
    if device == "cpu":
        note(
            f"--gpus {gpus}: device=cpu: each training uses its share of the cores and no GPU; use --scale gpu for GPUs"
        )
    if begun_not := run_side_by_side(tasks, found, runs / "logs", limit):
        note(f"--limit {limit.seconds:g}: no time left for {', '.join(begun_not)}; run the same command to resume")

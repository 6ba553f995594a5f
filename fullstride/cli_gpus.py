"""`--gpus 0,1` of `fullstride experiment`: its trainings as processes, one on each GPU, before the result is built."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fullstride.errors import ConfigError, Preempted

Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="GPUs of this machine to spread the trainings over: one process on each, with its share of the cores.",
    ),
]
SharedGpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="GPUs of this machine to spread the trainings over: one process on each, with its share of the cores; "
        "on one that is named twice, as in 0,0, two at a time.",
    ),
]
# Words behind `fullstride experiment`, by the names of their logs.
Lines = dict[str, list[str]]


def options(**given: Any) -> list[str]:
    """A command's options as words: `--name value`, of a sequence one each, nothing of None."""
    words = []
    for name, value in given.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        words += [word for one in values if one is not None for word in (f"--{name}", str(one))]
    return words


def spread(
    gpus: str, lines: Lines, runs: Path, collect: bool, limit: float | None = None, shared: bool = False
) -> None:
    """Run commands of `fullstride experiment` on the GPUs, and return once all of them are done.

    Args:
        gpus: as the option has them.
        lines: the commands; their logs are in `runs/logs`.
        runs: the folder of runs.
        collect: whether only what is there was asked for.
        limit: seconds of the whole, where the commands take such a limit.
        shared: whether several may share a GPU, since none is given a time.

    Raises:
        ConfigError: for GPUs that cannot be, or together with --collect.
        PeerError: if one of them failed, once the others have ended.
        Preempted: if the limit was reached.

    """
    from fullstride.launch.side_by_side import Task, gpus_of, run_side_by_side

    if collect:
        raise ConfigError(f"--gpus {gpus} --collect: --collect runs nothing; leave one of them out")
    tasks = [Task(name, ["experiment", *words], limited=limit is not None) for name, words in lines.items()]
    if not run_side_by_side(tasks, gpus_of(gpus, shared), runs / "logs", math.inf if limit is None else limit):
        raise Preempted(
            f"--limit {limit:g}: the time is over; the same command goes on, --collect gathers what is there"
        )

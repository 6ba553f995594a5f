"""The command `python -m benchmarks train-step`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.step_jax.options import MODELS, MODES, SECTIONS, USUAL, Options
from benchmarks.harness.result_paths import RESULTS
from benchmarks.harness.stop_requests import ending_early
from fullstride.cli.options import Results


def train_step(
    section: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join((*SECTIONS, "all")), help="Which tables, one each; host unless given."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="|".join(MODELS), help="BERT's size.")] = "base",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(MODES),
            help="Of the real step: nothing dropped, by fused attention or by attention written out; of hidden states "
            "alone; everywhere. The first and the last unless given.",
        ),
    ] = None,
    precision: Annotated[str, typer.Option(metavar="fp32|bf16", help="That the real step computes in.")] = "fp32",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of the real step.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 128,
    calls: Annotated[int, typer.Option(min=1, help="Timed calls of each way, in the tables about the host.")] = 300,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ways whose name has it; =NAME is that one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Nothing is begun after them, nor after Ctrl-C.")] = 500.0,
    profile: Annotated[
        Path | None, typer.Option(help="Folder for ten traced steps of each way of the real step, for TensorBoard.")
    ] = None,
    out: Results = RESULTS,
) -> None:
    """Equinox's ways to call a training step beside ours, JAX's own and the bare executable."""
    asked = section or ["host"]
    options = Options(
        sections=SECTIONS if "all" in asked else tuple(dict.fromkeys(asked)),
        model=model,
        modes=tuple(dict.fromkeys(mode or USUAL)),
        precision=precision,
        batch_size=batch_size,
        length=length,
        calls=calls,
        only=tuple(only or ()),
        seconds=seconds,
        profile=profile,
    )
    from benchmarks.cases.step_jax.train_step import run

    with ending_early():
        run(options, _network, out)


def _network(options: Options, mode: str) -> Any:
    from benchmarks.cases.bert.workload import workload

    return workload(options.model, mode, options.precision, options.batch_size, options.length)

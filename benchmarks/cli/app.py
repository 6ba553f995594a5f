"""The command line of the benchmarks: one command a case, an experiment and the report."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.jvp.options import AttentionOptions, HostOptions, NetworksOptions, NormsOptions
from benchmarks.cases.llm.options import AttentionOptions as PagedAttentionOptions
from benchmarks.cases.llm.options import LlmOptions as LlmOptions
from benchmarks.cases.llm.options import ProductsOptions, TokenOptions
from benchmarks.cases.meanflow.options import (
    FrameworkOptions,
    LoaderOptions,
    PeerOptions,
    SamplingOptions,
    ScalingOptions,
    StepOptions,
)
from benchmarks.cases.step_jax.options import TrainStepOptions as TrainStepOptions
from benchmarks.cases.trainings.options import TrainSoakOptions
from benchmarks.cli import experiments
from benchmarks.cli.report import report
from benchmarks.harness.budget import ending_early
from benchmarks.harness.options import CaseOptions, Results
from benchmarks.harness.result_paths import RESULTS, outputs
from fullstride.cli.from_dataclass import command_from
from fullstride.cli.help import App
from fullstride.cli.moved import ANYTHING
from fullstride.cli.running import OneLineErrors, announce


@dataclass(frozen=True)
class CaseRow:
    """Command of a case."""

    options: type[CaseOptions]  # its options; the docstring is its help
    run: str  # `module:name` of what it runs, which takes them and the folder of results

    def __call__(self, options: Any, out: Results = RESULTS) -> None:
        """Run the case; if it has a time budget, a signal ends it early and its rows so far are written."""
        module, name = self.run.split(":")
        run: Callable[..., Any] = attrgetter(name)(import_module(f"benchmarks.cases.{module}"))
        if hasattr(options, "device"):
            announce(options.device)
        with ending_early() if hasattr(options, "seconds") else nullcontext():
            run(options, out)


CASES = {
    "meanflow-step": CaseRow(StepOptions, "meanflow.step:run"),
    "meanflow-jax": CaseRow(FrameworkOptions, "meanflow.frameworks:run"),
    "meanflow-sampling": CaseRow(SamplingOptions, "meanflow.sampling:run"),
    "meanflow-scaling": CaseRow(ScalingOptions, "meanflow.scaling:run"),
    "meanflow-loader": CaseRow(LoaderOptions, "meanflow.loader:run"),
    "meanflow-peer": CaseRow(PeerOptions, "meanflow.peer:run"),
    "jvp-attention": CaseRow(AttentionOptions, "jvp.attention:BENCH.run"),
    "jvp-norms": CaseRow(NormsOptions, "jvp.norms:BENCH.run"),
    "jvp-host": CaseRow(HostOptions, "jvp.host:run"),
    "jvp-networks": CaseRow(NetworksOptions, "jvp.networks:run"),
    "train-step": CaseRow(TrainStepOptions, "step_jax.train_step:run_bert"),
    "train-soak": CaseRow(TrainSoakOptions, "trainings.soak:run"),
    "llm": CaseRow(LlmOptions, "llm.case:run"),
    "paged-attention": CaseRow(PagedAttentionOptions, "llm.attention:run"),
    "llm-products": CaseRow(ProductsOptions, "llm.products:run"),
    "llm-token": CaseRow(TokenOptions, "llm.token_steps:run"),
}
GROUPS = {
    "MeanFlow": " ".join(name for name in CASES if name.startswith("meanflow")),
    "Forward-mode derivatives": "jvp-attention jvp-norms jvp-host jvp-networks",
    "Training steps in JAX": "train-step",
    "Whole trainings": "train-soak",
    "Language models": "llm llm-token paged-attention llm-products",
}
app = App(
    "Measure a case against its roofline bound, run an experiment over several seeds, or write the report.",
    {**GROUPS, **experiments.GROUPS, "Results": "report"},
    cls=OneLineErrors,
)
for _name, _case in CASES.items():
    app.command(_name)(command_from(_case, _case.options, unique=True))
app.registered_commands.extend(experiments.app.registered_commands)
app.add_typer(report, name="report")


@app.command("fit-plan", hidden=True)
def fit_plan(results: Annotated[Path, typer.Argument(help="Folder of results.")]) -> None:
    """Refit the factors of `fullstride meanflow plan` to results, and store them, for its option --fit."""
    from benchmarks.tuning.plan_fit import write_fitted

    typer.echo(f"written to {write_fitted(results)}")


@app.command("outputs", hidden=True, context_settings=ANYTHING)
def show_outputs(context: typer.Context) -> None:
    """Print the paths that a benchmark command writes to, as JSON, for `fullstride launch`."""
    typer.echo(json.dumps(outputs(context.parent and context.parent.command, context.args)))

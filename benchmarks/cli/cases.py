"""`python -m benchmarks ...`: a case beside its roofline bound; each command imports what it measures when it runs."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from benchmarks.cases.jvp.options import AttentionOptions, NormsOptions
from benchmarks.cases.llm.options import AttentionOptions as PagedAttentionOptions
from benchmarks.cases.llm.options import Options as LlmOptions
from benchmarks.cases.meanflow.options import (
    LoaderOptions,
    PeerOptions,
    SamplingOptions,
    ScalingOptions,
    StepOptions,
)
from benchmarks.cases.step_jax.options import Options as TrainStepOptions
from benchmarks.harness.budget import ending_early
from benchmarks.harness.options import CaseOptions
from benchmarks.harness.result_paths import RESULTS
from fullstride.cli.from_dataclass import command_from
from fullstride.cli.help import App
from fullstride.cli.options import Results, announce


@dataclass(frozen=True)
class Case:
    """A command."""

    options: type[CaseOptions]  # its options; the docstring is its help
    run: str  # `module:name` of what it runs, which takes them and the folder of results

    def __call__(self, options: Any, out: Results = RESULTS) -> None:
        """Run it; where it has a time to be done by, a signal ends it early, with what was measured written."""
        module, name = self.run.split(":")
        run: Callable[..., Any] = attrgetter(name)(import_module(f"benchmarks.cases.{module}"))
        if hasattr(options, "device"):
            announce(options.device)
        with ending_early() if hasattr(options, "seconds") else nullcontext():
            run(options, out)


CASES = {
    "meanflow-step": Case(StepOptions, "meanflow.step:run"),
    "meanflow-sampling": Case(SamplingOptions, "meanflow.sampling:run"),
    "meanflow-scaling": Case(ScalingOptions, "meanflow.scaling:run"),
    "meanflow-loader": Case(LoaderOptions, "meanflow.loader:run"),
    "meanflow-peer": Case(PeerOptions, "meanflow.peer:run"),
    "jvp-attention": Case(AttentionOptions, "jvp.attention:BENCH.run"),
    "jvp-norms": Case(NormsOptions, "jvp.norms:BENCH.run"),
    "train-step": Case(TrainStepOptions, "step_jax.train_step:run_bert"),
    "llm": Case(LlmOptions, "llm.case:run"),
    "paged-attention": Case(PagedAttentionOptions, "llm.attention:run"),
}
GROUPS = {
    "MeanFlow": " ".join(name for name in CASES if name.startswith("meanflow")),
    "Forward-mode derivatives": "jvp-attention jvp-norms",
    "Training steps in JAX": "train-step",
    "Language models": "llm paged-attention",
}
app = App("Measure a case beside its roofline bound.", GROUPS)
for _name, _case in CASES.items():
    app.command(_name)(command_from(_case, _case.options, unique=True))

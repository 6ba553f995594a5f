"""Options of `python -m benchmarks train-step`; imports no framework."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, Names, Seconds, among
from fullstride.errors import ConfigError

SECTIONS = ("host", "leaves", "static", "law", "saving", "nnx", "step")
MODELS = ("tiny", "mini", "small", "medium", "base", "large")
PRECISIONS = ("fp32", "bf16")
# Nothing dropped, by fused attention and by attention written out; dropped beside fused attention, and everywhere.
MODES = ("sdpa", "eager", "hidden", "dropout")
# The two ends, which are compared unless told; what lies between says which of their differences costs what.
USUAL = ("sdpa", "dropout")


@dataclass(frozen=True)
class TrainStepOptions(CaseOptions):
    """Compare ways to call a training step: Equinox's, fullstride's, JAX's own and the bare executable."""

    sections: Annotated[
        Names, among("|".join((*SECTIONS, "all")), "Table to measure; may be repeated.", "--section"), SECTIONS
    ] = ("host",)
    model: Annotated[str, among("|".join(MODELS), "Size of BERT."), MODELS] = "base"
    modes: Annotated[
        Names,
        among(
            "|".join(MODES),
            "Dropout of the real step: none, with fused attention or explicit attention; of hidden states only; "
            "everywhere.",
            "--mode",
        ),
        MODES,
    ] = USUAL
    precision: Annotated[str, among("fp32|bf16", "Precision of the real step."), PRECISIONS] = "fp32"
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per real step.")] = 8
    length: Annotated[int, typer.Option(min=1, help="Number of tokens per row.")] = 128
    calls: Annotated[
        int, typer.Option(min=1, help="Number of timed calls of each way, in the tables of host time.")
    ] = 300
    only: Annotated[Names, among("TEXT", "Part of the names of ways to measure; =NAME is the whole name.")] = ()
    seconds: Seconds = 500.0
    profile: Annotated[
        Path | None, typer.Option(help="Folder for ten traced steps of each way of the real step, for TensorBoard.")
    ] = None

    def __post_init__(self) -> None:
        """Check the names, and that a step to be traced is run; `all` stands for every section."""
        if "all" in self.sections:
            object.__setattr__(self, "sections", SECTIONS)
        super().__post_init__()
        if self.profile is not None and "step" not in self.sections:
            raise ConfigError(
                f"--profile {self.profile}: only the real step can be traced; received --section "
                f"{', '.join(self.sections)}, add --section step"
            )

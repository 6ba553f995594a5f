"""Options of `python -m benchmarks train-soak`; imports no framework."""

from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, among


@dataclass(frozen=True)
class TrainSoakOptions(CaseOptions):
    """Short trainings one after the other in one process, and what drifts meanwhile."""

    workload: Annotated[str, among("meanflow|bert", "What is trained."), ("meanflow", "bert")] = "meanflow"
    runs: Annotated[int, typer.Option(min=2, help="Number of trainings.")] = 1000

"""Measured steps of several GPUs, and what a plan would have said of them with the link measured beside them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tuning.planned_steps import MACHINE, work_of
from fullstride.meanflow.planning.cost import Costs, PlannedStep, Rates, all_reduce_ms, step_ms


@dataclass(frozen=True)
class SharedStep:
    """A step of one GPU, or of several that share it, each with a batch of its own.

    Attributes:
        file: its result's.
        name: its row's.
        model: the network, a choice of `model=`.
        kind: none for a GPU alone, ddp or fsdp.
        gpus: that share it.
        step: of one of them.
        ms: the median of its times, the slowest GPU's.
        transfer_ms: of the sum of as many bytes as there are gradients, with nothing beside it; 0 for a GPU alone.

    """

    file: str
    name: str
    model: str
    kind: str
    gpus: int
    step: PlannedStep
    ms: float
    transfer_ms: float

    @property
    def link(self) -> float:
        """Bytes a second of each GPU's link in that sum, as `--link-gbs` has them; 0 for a GPU alone."""
        if not self.transfer_ms:
            return 0.0
        # What a ring takes at a byte a second, over what it took.
        return all_reduce_ms(self._parameters, self.gpus, 1.0) / self.transfer_ms

    @property
    def _parameters(self) -> int:
        return work_of(self.model, self.step.precision == "bf16").parameters

    def predicted_ms(self, rates: dict[str, Rates], costs: Costs) -> float:
        """By the plan, which adds the sum of gradients in full; fsdp is planned as ddp."""
        work = work_of(self.model, self.step.precision == "bf16")
        reduced = all_reduce_ms(work.parameters, self.gpus, self.link) if self.gpus > 1 else 0.0
        return step_ms(work, self.step, rates[self.step.precision], costs) + reduced


def shared_steps(folder: Path) -> list[SharedStep]:
    """Every recorded step of `bench meanflow-scaling` that was measured on `MACHINE`; none before it has been."""
    return [row for path in sorted(folder.glob("meanflow-scaling--*.json")) for row in _steps(path)]


def _steps(path: Path) -> Iterator[SharedStep]:
    data: dict[str, Any] = json.loads(path.read_text())
    c, gpu = data["conditions"], (data["environment"]["gpu"] or {}).get("name")
    if gpu != MACHINE or data["device"] != "cuda" or "graph" not in c["backend"]:
        return
    for row in data["rows"]:
        extra = row["extra"]
        if extra["ratio"] is None:
            continue  # how much memory a large network takes
        step = PlannedStep(
            extra["batch"], extra["ratio"], c["precision"], c["backend"], whole=True, averages=c["averages"]
        )
        yield SharedStep(
            path.name,
            row["name"],
            extra["model"],
            extra["kind"],
            extra["processes"],
            step,
            row["timing"]["median_ms"],
            extra.get("transfer_ms", 0.0),
        )

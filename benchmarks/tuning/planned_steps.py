"""Every measured step that a plan is held against, and profiles and rates of its machine, from the files of results.

Few rows are fitted, the others are predicted: `FITTED` names the former. Of TF32 and fp32 two steps of one network are
fitted, since no other network was measured in them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.planning.cost import PRECISIONS, NetworkWork, PlannedStep, Rates
from fullstride.meanflow.planning.work import count_work

MACHINE = "NVIDIA H200"
CHANGES = "meanflow-step-changes--nvidia-h200.json"
PEER = "meanflow-peer--compile+graph--nvidia-h200.json"
# Networks and batches whose bf16 steps of flow matching and of MeanFlow with all samples in the JVP are fitted.
FITTED = {("unet", 16), ("unet", 512), ("dit_b2", 64), ("dit_b2", 256)}


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured.

    Attributes:
        file: name of the result's file.
        name: name of the row.
        model: the network, a choice of `model=`.
        step: the step's settings.
        ms: the median of its times.
        memory: peak memory in bytes; None if unknown.
        fitted: whether the costs were fitted to it.
        dropout: whether the network uses its preset's dropout.

    """

    file: str
    name: str
    model: str
    step: PlannedStep
    ms: float
    memory: float | None
    fitted: bool
    dropout: bool = False


@cache
def work_of(model: str, half: bool, dropout: bool = False) -> NetworkWork:
    """Work of a preset at the size of the step's benchmark, without classes."""
    config = MODELS[model]()
    if "dropout" in vars(config) and not dropout:
        config = replace(config, dropout=0.0)
    return count_work(config, (1, 8, 8) if model.endswith("tiny") else config.image_shape, half=half)


def work_for(row: MeasuredStep) -> NetworkWork:
    """Work of a measured step's network."""
    return work_of(row.model, row.step.precision == "bf16", row.dropout)


def measured(folder: Path) -> list[MeasuredStep]:
    """Every captured step of MeanFlow and flow matching by the default settings that was measured on `MACHINE`."""
    found = [row for name, data in _results(folder) for row in _steps(name, data)]
    return [*found, *_peer(folder / PEER)]


def _results(folder: Path, kind: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the results of the step's bench on `MACHINE`, of one kind by how their names go on."""
    for path in sorted(folder.glob(f"meanflow-step--{kind}*.json")):
        data = json.loads(path.read_text())
        if (data["environment"]["gpu"] or {}).get("name") == MACHINE:
            yield path.name, data


def _steps(file: str, data: dict[str, Any]) -> Iterator[MeasuredStep]:
    c = data["conditions"]
    if data["device"] != "cuda":
        return
    for row in data["rows"]:
        extra = row["extra"]
        name = re.fullmatch(r"FM MSE|MeanFlow (\d+)%", extra["name"])
        if name is None or "graph" not in extra["backend"]:
            continue
        ratio = int(name[1] or 0) / 100
        whole = c.get("step") == "full"
        step = PlannedStep(extra["batch"], ratio, c["precision"], extra["backend"], whole, c.get("averages", 0))
        yield MeasuredStep(
            file,
            extra["name"],
            c["model"],
            step,
            row["timing"]["median_ms"],
            peak if (peak := row["timing"]["peak_bytes"]) is None else float(peak),
            _is_fitted(c["model"], step, extra["name"]),
            bool(c.get("dropout")),
        )


def _is_fitted(model: str, step: PlannedStep, name: str) -> bool:
    if step.whole or name == "MeanFlow 0%":
        return False
    if step.backend == "graph":
        return step.precision == "bf16" and step.ratio == 0
    if step.precision != "bf16":
        return step.ratio in (0, 1)
    return (model, step.batch) in FITTED and step.ratio in (0, 1)


def _peer(path: Path) -> Iterator[MeasuredStep]:
    """CIFAR-10's whole step, which was timed beside py-meanflow's."""
    rows = {row["name"]: row["timing"] for row in json.loads(path.read_text())["rows"]}
    for precision in ("bf16", "tf32"):
        step = PlannedStep(128, 0.75, precision, "compile+graph", whole=True, averages=3, period=16)
        timing = rows[f"fullstride, {precision}"]
        name = f"whole step, {precision}"
        memory = float(timing["peak_bytes"])
        yield MeasuredStep(path.name, name, "song_unet", step, timing["median_ms"], memory, False, dropout=True)


def rates_of(folder: Path) -> dict[str, Rates]:
    """By precision, the median over all results of `MACHINE` of the rates that were measured with each."""
    found: dict[str, list[dict[str, float]]] = {}
    for _, data in _results(folder):
        found.setdefault(data["conditions"]["precision"], []).append(data["ceilings"])
    copies = median(c["bytes"] for every in found.values() for c in every)
    return {precision: Rates(median(c["flops"] for c in found[precision]), copies) for precision in PRECISIONS}


def memory_of(folder: Path) -> int:
    """Bytes of one GPU of `MACHINE`, as it says itself."""
    return max(data["environment"]["gpu"]["memory_bytes"] for _, data in _results(folder))


def profiles_of(folder: Path) -> list[tuple[str, PlannedStep, dict[str, float]]]:
    """Milliseconds of kernels by kind of work, of steps at batch 64 on `MACHINE`; 1x1 convolutions run as products."""
    found = []
    for _, data in _results(folder, "unet--bf16--compile,"):
        for row in data["rows"]:
            if groups := row["extra"].get("profile", {}).get("groups"):
                found.append(("unet", PlannedStep(64, float(row["extra"]["ratio"])), _kinds(groups, "convolutions")))
    for row in json.loads((folder / CHANGES).read_text())["rows"]:
        if row["model"] == "dit_b2" and row["groups_ms"]:
            found.append(("dit_b2", PlannedStep(64, float(row["ratio"])), _kinds(row["groups_ms"], "matrix products")))
    return found


def _kinds(groups: dict[str, float], products: str) -> dict[str, float]:
    return {
        products: groups["convolution"] + groups["matmul"],
        "attention": groups["attention"],
        "norms and memory": groups["norm"] + groups["pointwise"],
    }

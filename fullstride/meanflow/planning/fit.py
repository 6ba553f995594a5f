"""The factors of the cost model, fitted to measured steps and profiles; and every measured step, to check it by.

Few rows are fitted, the others are predicted: `FITTED` names the former. Of TF32 and fp32 two steps of one network are
fitted, since no other network was measured in them.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fullstride.meanflow.planning.cost import PRECISIONS, Costs, Rates, Step, Work, parts
from fullstride.meanflow.planning.work import count_work
from fullstride.meanflow.presets import MODELS

KEPT_FILE = Path(__file__).with_name("fitted.json")
MACHINE = "NVIDIA H200"
CHANGES = "meanflow-step-changes--nvidia-h200.json"
PEER = "meanflow-beside-py-meanflow--nvidia-h200.json"
# Networks and batches whose bf16 steps of flow matching and of MeanFlow with all samples in the JVP are fitted.
FITTED = {("unet", 16), ("unet", 512), ("dit_b2", 64), ("dit_b2", 256)}
# How much a profile's row counts beside a step's.
PROFILE_WEIGHT = 0.5
KINDS = ("convolutions", "matrix products", "attention", "norms and memory", "calls")


@dataclass(frozen=True)
class Measured:
    """A step that was measured.

    Attributes:
        file: its result's.
        name: its row's.
        model: the network, a choice of `model=`.
        step: how it was run.
        ms: the median of its times.
        memory: most bytes alive, None where that is not known.
        fitted: whether the costs were fitted to it.
        dropout: whether the network drops units as its preset says.

    """

    file: str
    name: str
    model: str
    step: Step
    ms: float
    memory: float | None
    fitted: bool
    dropout: bool = False


@cache
def work_of(model: str, half: bool, dropout: bool = False) -> Work:
    """Of a preset at the size of the step's bench, without classes."""
    config, shape = MODELS[model](), (4, 32, 32) if model.startswith("dit") else (3, 32, 32)
    if hasattr(config, "dropout") and not dropout:
        config.dropout = 0.0
    return count_work(config, (1, 8, 8) if model.endswith("tiny") else shape, half=half)


def work_for(row: Measured) -> Work:
    """Of a measured step's network."""
    return work_of(row.model, row.step.precision == "bf16", row.dropout)


def measured(folder: Path) -> list[Measured]:
    """Every recorded step of MeanFlow and flow matching by the default settings that was measured on `MACHINE`."""
    found = [row for path in sorted(folder.glob("meanflow-step--*.json")) for row in _steps(path)]
    return [*found, *_peer(folder / PEER)]


def _steps(path: Path) -> Iterator[Measured]:
    data = json.loads(path.read_text())
    c, gpu = data["conditions"], (data["environment"]["gpu"] or {}).get("name")
    if gpu != MACHINE or data["device"] != "cuda":
        return
    for row in data["rows"]:
        extra = row["extra"]
        name = re.fullmatch(r"FM MSE|MeanFlow (\d+)%", extra["name"])
        if name is None or "graph" not in extra["backend"]:
            continue
        ratio = int(name[1] or 0) / 100
        step = Step(extra["batch"], ratio, c["precision"], extra["backend"], *_whole(c))
        yield Measured(
            path.name,
            extra["name"],
            c["model"],
            step,
            row["timing"]["median_ms"],
            peak if (peak := row["timing"]["peak_bytes"]) is None else float(peak),
            _is_fitted(c["model"], step, extra["name"]),
            bool(c.get("dropout")),
        )


def _whole(conditions: dict[str, Any]) -> tuple[bool, int]:
    return conditions.get("step") == "full", conditions.get("averages", 0)


def _is_fitted(model: str, step: Step, name: str) -> bool:
    if step.whole or name == "MeanFlow 0%":
        return False
    if step.backend == "graph":
        return step.precision == "bf16" and step.ratio == 0
    if step.precision != "bf16":
        return step.ratio in (0, 1)
    return (model, step.batch) in FITTED and step.ratio in (0, 1)


def _peer(path: Path) -> Iterator[Measured]:
    """CIFAR-10's whole step, which was timed beside py-meanflow's."""
    times = json.loads(path.read_text())["step_ms"]
    for precision in ("bf16", "tf32"):
        step = Step(128, 0.75, precision, "compile+graph", whole=True, averages=3, period=16)
        row = times[precision]["bare"]
        name = f"whole step, {precision}"
        yield Measured(path.name, name, "song_unet", step, row["median"], row["GiB"] * 2**30, False, dropout=True)


def rates_of(folder: Path) -> dict[str, Rates]:
    """By precision, the median over all results of `MACHINE` of the rates that were measured with each."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in sorted(folder.glob("meanflow-step--*.json")):
        data = json.loads(path.read_text())
        if (data["environment"]["gpu"] or {}).get("name") == MACHINE:
            found.setdefault(data["conditions"]["precision"], []).append(data["ceilings"])
    copies = median(c["bytes"] for every in found.values() for c in every)
    return {precision: Rates(median(c["flops"] for c in found[precision]), copies) for precision in PRECISIONS}


def memory_of(folder: Path) -> int:
    """Bytes of one GPU of `MACHINE`, as it says itself."""
    found = [json.loads(path.read_text())["environment"]["gpu"] for path in folder.glob("meanflow-step--*.json")]
    return max(gpu["memory_bytes"] for gpu in found if (gpu or {}).get("name") == MACHINE)


ONES = dict.fromkeys(PRECISIONS, 1.0)
UNIT = Costs(ONES, product=1.0, attention=1.0, moved=1.0, call_us=1.0, tangent=ONES, written=0.0, kept=ONES)


def fit(folder: Path) -> Costs:
    """The factors: least squares of relative errors for bf16, then what TF32, fp32 and steps as written add."""
    rates, rows = rates_of(folder), [row for row in measured(folder) if row.fitted]
    factors = _bf16([r for r in rows if _recorded(r, "bf16")], _profiles(folder), rates["bf16"])
    convolution, product, attention, moved, call = map(float, factors)
    costs = replace(
        UNIT, convolution={"bf16": convolution}, product=product, attention=attention, moved=moved, call_us=call,
        tangent={"bf16": 1.0}, kept={},
    )  # fmt: skip
    for precision in ("tf32", "fp32"):
        costs = _other(costs, precision, [r for r in rows if _recorded(r, precision)], rates[precision])
    written = median(_written(costs, row, rates["bf16"]) for row in rows if row.step.backend == "graph")
    return _rounded(replace(costs, written=written, kept=_kept(rows)))


def _recorded(row: Measured, precision: str) -> bool:
    return (row.step.precision, row.step.backend) == (precision, "compile+graph")


def _bf16(rows: Sequence[Measured], profiles: list[tuple[str, Step, dict[str, float]]], rates: Rates) -> Any:
    from scipy.optimize import nnls

    equations, right = [], []
    for row in rows:
        found = parts(work_for(row), row.step, rates, UNIT)
        equations.append([found[kind] / row.ms for kind in KINDS])
        right.append((row.ms - found["casts of weights"]) / row.ms)
    for model, step, groups in profiles:
        found = parts(work_of(model, True), step, rates, UNIT)
        for kind, ms in groups.items():
            equations.append([PROFILE_WEIGHT * found[k] / ms * (k == kind) for k in KINDS])
            right.append(PROFILE_WEIGHT)
    return nnls(np.array(equations), np.array(right))[0]


def _profiles(folder: Path) -> list[tuple[str, Step, dict[str, float]]]:
    """Of steps at batch 64, milliseconds of kernels by kind of work; 1x1 convolutions run as products."""
    found = []
    for path in sorted(folder.glob("meanflow-step--unet--bf16--compile,*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if groups := row["extra"].get("profile", {}).get("groups"):
                found.append(("unet", Step(64, float(row["extra"]["ratio"])), _kinds(groups, "convolutions")))
    for row in json.loads((folder / CHANGES).read_text())["rows"]:
        if row["model"] == "dit_b2" and row["groups_ms"]:
            found.append(("dit_b2", Step(64, float(row["ratio"])), _kinds(row["groups_ms"], "matrix products")))
    return found


def _kinds(groups: dict[str, float], products: str) -> dict[str, float]:
    return {
        products: groups["convolution"] + groups["matmul"],
        "attention": groups["attention"],
        "norms and memory": groups["norm"] + groups["pointwise"],
    }


def _other(costs: Costs, precision: str, rows: Sequence[Measured], rates: Rates) -> Costs:
    """With the factor of convolutions from flow matching's step, and of tangents from MeanFlow's at 100 %."""

    def solved(row: Measured, made: Callable[[float], Costs]) -> float:
        low, high = (sum(parts(work_for(row), row.step, rates, made(x)).values()) for x in (0.0, 1.0))
        return (row.ms - low) / (high - low)

    flow, full = (median_row([r for r in rows if r.step.ratio == ratio]) for ratio in (0.0, 1.0))
    tangent = costs.tangent | {precision: 1.0}
    factor = solved(flow, lambda x: replace(costs, tangent=tangent, convolution=costs.convolution | {precision: x}))
    costs = replace(costs, tangent=tangent, convolution=costs.convolution | {precision: factor})
    slow = solved(full, lambda x: replace(costs, tangent=tangent | {precision: x}))
    return replace(costs, tangent=tangent | {precision: slow})


def median_row(rows: Sequence[Measured]) -> Measured:
    """The middle one by its time."""
    return sorted(rows, key=lambda row: row.ms)[len(rows) // 2]


def _written(costs: Costs, row: Measured, rates: Rates) -> float:
    compiled = sum(parts(work_for(row), row.step, rates, costs).values())
    once = 4 * work_for(row).pointwise / rates.bytes * 1e3 * row.step.batch * 3
    return (row.ms - compiled) / once


def _kept(rows: Sequence[Measured]) -> dict[str, float]:
    """Of the activations' bytes, from the largest steps of flow matching in each precision."""
    found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for row in rows:
        largest = row.step.precision != "bf16" or row.step.batch >= 256
        if row.memory and row.step.ratio == 0 and row.step.backend == "compile+graph" and largest:
            work = work_for(row)
            held = row.memory - (4 + 2 * (row.step.precision == "bf16")) * work.parameters
            found[row.step.precision].append(held / (row.step.batch * work.kept))
    return {precision: median(every) for precision, every in found.items()}


def _rounded(costs: Costs) -> Costs:
    def three(value: Any) -> Any:
        return {k: three(v) for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.3g}")

    return Costs.of({key: three(value) for key, value in asdict(costs).items()})


def write_fitted(folder: Path, out: Path = KEPT_FILE) -> Path:
    """Fit and keep the factors with the rates that they belong to, and the files they come from."""
    files = sorted({row.file for row in measured(folder) if row.fitted} | {CHANGES})
    kept = {
        "machine": MACHINE,
        "memory_bytes": memory_of(folder),
        "rates": {precision: asdict(rates) for precision, rates in rates_of(folder).items()},
        "costs": asdict(fit(folder)),
        "fitted to": files,
    }
    out.write_text(json.dumps(kept, indent=1) + "\n")
    return out


@dataclass(frozen=True)
class Fitted:
    """What is kept of a fit.

    Attributes:
        machine: the GPU's name.
        memory_bytes: of one.
        rates: its own, by precision.
        costs: the factors.

    """

    machine: str
    memory_bytes: int
    rates: dict[str, Rates]
    costs: Costs


def fitted(path: Path = KEPT_FILE) -> Fitted:
    """The kept fit."""
    kept = json.loads(path.read_text())
    rates = {precision: Rates(**rates) for precision, rates in kept["rates"].items()}
    return Fitted(kept["machine"], kept["memory_bytes"], rates, Costs.of(kept["costs"]))

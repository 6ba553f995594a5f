"""The factors of the planner's cost model, fitted to measured steps and profiles."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.tuning.planned_steps import (
    CHANGES,
    MACHINE,
    MeasuredStep,
    measured,
    memory_of,
    profiles_of,
    rates_of,
    work_for,
    work_of,
)
from fullstride.meanflow.planning.cost import PRECISIONS, Costs, PlannedStep, Rates, parts
from fullstride.meanflow.planning.fit import KEPT_FILE

# How much a profile's row counts beside a step's.
PROFILE_WEIGHT = 0.5
KINDS = ("convolutions", "matrix products", "attention", "norms and memory", "calls")


ONES = dict.fromkeys(PRECISIONS, 1.0)
UNIT = Costs(ONES, product=1.0, attention=1.0, moved=1.0, call_us=1.0, tangent=ONES, written=0.0, kept=ONES)


def fit(folder: Path) -> Costs:
    """The factors: least squares of relative errors for bf16, then what TF32, fp32 and steps as written add."""
    rates, rows = rates_of(folder), [row for row in measured(folder) if row.fitted]
    factors = _bf16([r for r in rows if _recorded(r, "bf16")], profiles_of(folder), rates["bf16"])
    convolution, product, attention, moved, call = map(float, factors)
    costs = replace(
        UNIT, convolution={"bf16": convolution}, product=product, attention=attention, moved=moved, call_us=call,
        tangent={"bf16": 1.0}, kept={},
    )  # fmt: skip
    for precision in ("tf32", "fp32"):
        costs = _other(costs, precision, [r for r in rows if _recorded(r, precision)], rates[precision])
    written = median(_written(costs, row, rates["bf16"]) for row in rows if row.step.backend == "graph")

    def rounded(value: Any) -> Any:
        return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.3g}")

    return Costs(**rounded(asdict(replace(costs, written=written, kept=_kept(rows)))))


def _recorded(row: MeasuredStep, precision: str) -> bool:
    return (row.step.precision, row.step.backend) == (precision, "compile+graph")


def _bf16(rows: Sequence[MeasuredStep], profiles: list[tuple[str, PlannedStep, dict[str, float]]], rates: Rates) -> Any:
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


def _other(costs: Costs, precision: str, rows: Sequence[MeasuredStep], rates: Rates) -> Costs:
    """With the factor of convolutions from flow matching's step, and of tangents from MeanFlow's at 100 %."""

    def solved(row: MeasuredStep, made: Callable[[float], Costs]) -> float:
        low, high = (sum(parts(work_for(row), row.step, rates, made(x)).values()) for x in (0.0, 1.0))
        return (row.ms - low) / (high - low)

    sorted_rows = ([r for r in sorted(rows, key=lambda r: r.ms) if r.step.ratio == ratio] for ratio in (0.0, 1.0))
    flow, full = (each[len(each) // 2] for each in sorted_rows)  # the middle one by its time
    tangent = costs.tangent | {precision: 1.0}
    factor = solved(flow, lambda x: replace(costs, tangent=tangent, convolution=costs.convolution | {precision: x}))
    costs = replace(costs, tangent=tangent, convolution=costs.convolution | {precision: factor})
    slow = solved(full, lambda x: replace(costs, tangent=tangent | {precision: x}))
    return replace(costs, tangent=tangent | {precision: slow})


def _written(costs: Costs, row: MeasuredStep, rates: Rates) -> float:
    compiled = sum(parts(work_for(row), row.step, rates, costs).values())
    once = 4 * work_for(row).pointwise / rates.bytes * 1e3 * row.step.batch * 3
    return (row.ms - compiled) / once


def _kept(rows: Sequence[MeasuredStep]) -> dict[str, float]:
    """Fitted ratio of held bytes to activation bytes, from the largest flow-matching steps in each precision."""
    found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for row in rows:
        largest = row.step.precision != "bf16" or row.step.batch >= 256
        if row.memory and row.step.ratio == 0 and row.step.backend == "compile+graph" and largest:
            work = work_for(row)
            held = row.memory - (4 + 2 * (row.step.precision == "bf16")) * work.parameters
            found[row.step.precision].append(held / (row.step.batch * work.kept))
    return {precision: median(every) for precision, every in found.items()}


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

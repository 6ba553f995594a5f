"""MeanFlow's training step beside flow matching's and the floor."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.case import MEANFLOW_STEP, Case, Finding
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots, lines
from benchmarks.report.reading import Measurement, Result, marked
from benchmarks.report.tables import ORIGIN, Cell, Judge, Table, number, origin, over_bound

PACKAGES = ("torch", "triton")
SHARES = (0, 25, 50, 75, 100)
WHOLE = "full step"


@dataclass(frozen=True)
class Steps:
    """Training steps of one network, batch and backend: flow matching's, and MeanFlow's by percent in the JVP."""

    result: Result
    backend: str
    batch: int
    flow_matching: Measurement
    by_share: dict[int, Measurement]

    @property
    def name(self) -> str:
        """Network, precision and batch, and what of it is unusual: steps of one name compare."""
        c = self.result.conditions
        unusual = (WHOLE if c.get("step") == "full" else "", c.get("memory_order"), "dropout" * bool(c.get("dropout")))
        return ", ".join([f"{c.get('model')} {c.get('precision')}", f"batch {self.batch}", *filter(None, unusual)])

    def ratio(self, share: int) -> float | None:
        """Over flow matching by the same backend."""
        step = self.by_share.get(share)
        return step.median / self.flow_matching.median if step else None


def share_of(row: Measurement) -> int | None:
    """Percent of the samples in the JVP; -1 for flow matching, None for what is no step by the default settings."""
    name = str(row.extra.get("name", row.name))
    if re.fullmatch(r"FM MSE( step)?", name):
        return -1
    found = re.fullmatch(r"MeanFlow (\d+)%( step)?", name)
    return int(found[1]) if found else None


def steps_of(result: Result) -> list[Steps]:
    """The result's steps by batch and backend, those without flow matching left out."""
    found: dict[tuple[Any, Any], dict[int, Measurement]] = {}
    for row in result.rows:
        batch = row.extra.get("batch", result.conditions.get("batch_size"))
        backend = row.extra.get("backend", result.conditions.get("backend"))
        if (share := share_of(row)) is not None:
            found.setdefault((batch, backend), {}).setdefault(share, row)
    return [Steps(result, backend, batch, rows.pop(-1), rows) for (batch, backend), rows in found.items() if -1 in rows]


def headline(result: Result) -> Measurement:
    """The fastest step with all samples in the JVP at the batch of the result's conditions."""
    full = [row for row in result.rows if share_of(row) == 100]
    batch = result.conditions.get("batch_size")
    chosen = [row for row in full if row.extra.get("batch", batch) == batch] or full or list(result.rows)
    return min(chosen, key=lambda row: row.median)


def _table(caption: str, steps: list[Steps], header: tuple[str, ...], cells, judge: Judge) -> Table:
    rows: list[list[Cell]] = [[s.name, s.backend, *cells(s), *origin(s.result, judge, PACKAGES)] for s in steps]
    return Table(caption, ("network", "backend", *header, *ORIGIN), rows, text=2)


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """Times with roofline bounds, and ratios to flow matching."""
    steps = [s for result in results for s in steps_of(result)]
    shares = tuple(f"MeanFlow {share} %" for share in SHARES)
    times = _table(
        f"One step, forward and backward, where it says so a {WHOLE} with optimizer and averages: medians in ms.",
        steps,
        ("flow matching", "its bound", *shares, "bound of 100 %"),
        lambda s: [number(v) for v in (s.flow_matching.median, s.flow_matching.floor, *_medians(s), _floor(s))],
        judge,
    )
    ratios = _table(
        "MeanFlow over flow matching by the same backend in the same run. The arithmetic asks for 1 + share / 3: "
        "1.08 at 25 %, 1.17 at 50 %, 1.25 at 75 %, 1.33 at 100 %.",
        steps,
        shares,
        lambda s: [number(s.ratio(share), 3) for share in SHARES],
        judge,
    )
    return [times, ratios]


def _medians(steps: Steps) -> list[float | None]:
    return [steps.by_share[share].median if share in steps.by_share else None for share in SHARES]


def _floor(steps: Steps) -> float | None:
    return steps.by_share[100].floor if 100 in steps.by_share else None


def _fastest(steps: list[Steps]) -> dict[str, Steps]:
    """By network, precision, batch and machine, the backend whose whole MeanFlow step is fastest."""
    found, mark = dict[str, Steps](), marked([s.result for s in steps])
    for s in sorted((s for s in steps if 100 in s.by_share), key=lambda s: s.by_share[100].median):
        found.setdefault(f"{s.name}, {s.backend}{mark(s.result)}", s)
    best: dict[tuple[str, str], str] = {}
    for label, s in found.items():
        best.setdefault((s.name, s.result.machine), label)
    return {label: found[label] for label in best.values()}


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Step time beside the roofline bound, and the ratio by share and backend."""
    steps = [s for result in results for s in steps_of(result)]
    return [*_times(_fastest(steps)), *_ratios(steps)]


def _times(fastest: dict[str, Steps]) -> list[Drawn]:
    if not fastest:
        return []
    full = {label: s.by_share[100] for label, s in fastest.items()}
    series = [
        Series("bound of MeanFlow", {label: m.floor for label, m in full.items()}, bound=True),
        Series("MeanFlow, 100 % in the JVP", {label: m.median for label, m in full.items()}),
        Series("flow matching", {label: s.flow_matching.median for label, s in fastest.items()}),
    ]
    notes = {label: f"{over_bound(m)} x bound" for label, m in full.items()}
    figure = dots(series, "ms a step (log)", log=True, joined=True, notes=notes)
    caption = (
        "A step's time beside its bound, by the fastest backend of each network, precision and batch; forward and "
        f"backward alone where it is no {WHOLE}. The bound is that of MeanFlow's arithmetic at the matrix rate reached "
        "in the same run."
    )
    return [Drawn("meanflow-step-floor", caption, figure, "Step times of MeanFlow and flow matching, with bounds")]


def _ratios(steps: list[Steps]) -> list[Drawn]:
    groups: dict[tuple[str, str], dict[str, Steps]] = {}
    for s in steps:
        if len(s.by_share) > 2:
            chosen = groups.setdefault((s.name, s.result.machine), {})
            chosen[s.backend] = max(chosen.get(s.backend, s), s, key=lambda one: len(one.by_share))
    if not groups:
        return []
    (name, machine), chosen = max(groups.items(), key=lambda item: len(item[1]))
    series = [
        Series(backend, {share: r for share in SHARES if (r := s.ratio(share)) is not None})
        for backend, s in chosen.items()
    ]
    bound = Series("what the arithmetic asks", {0: 1.0, 100: 4 / 3})
    figure = lines(series, "percent of the samples in the JVP", "MeanFlow / flow matching", bound)
    caption = (
        f"MeanFlow over flow matching by the same backend and run: {name}, {machine}. Steps that are not recorded as a "
        "graph wait for the host, whose times scatter."
    )
    return [Drawn("meanflow-step-ratio", caption, figure, f"Ratio of MeanFlow to flow matching, {name}, by backend")]


def finding(results: Sequence[Result]) -> Finding | None:
    """The ratio at 100 % of the fastest backend of what was measured by most backends, in its first result."""
    steps = [s for result in results for s in steps_of(result) if 100 in s.by_share]
    if not steps:
        return None
    names = [(s.name, s.result.machine) for s in steps]
    chosen = max(names, key=lambda name: len({s.backend for s in steps if (s.name, s.result.machine) == name}))
    same = [s for s, name in zip(steps, names, strict=True) if name == chosen]
    fastest = min(same, key=lambda s: s.by_share[100].median).backend
    first = next(s for s in same if s.backend == fastest)
    return Finding(
        f"{number(first.ratio(100), 3)} x",
        "a MeanFlow step with every sample in the JVP over a flow matching step, where the arithmetic asks for 1.33: "
        f"{first.name}, {first.backend}, {first.result.machine}",
    )


CASE = Case(
    name="meanflow-step",
    title="MeanFlow's training step",
    about=(
        "Forward and backward pass on fresh noise and times. MeanFlow sends a share of the samples through a forward "
        "derivative, which costs the arithmetic of one more forward pass for them; what a step takes beyond that is "
        "overhead. Eager steps wait for the host."
    ),
    paths=(
        *(f"benchmarks/cases/meanflow/step_{name}.py" for name in ("alternatives", "passes", "profile", "run")),
        *MEANFLOW_STEP,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)

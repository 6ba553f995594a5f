"""Tables of the step benchmark's results, and targets for the ways to call a step."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.cases.step_jax.host import Times, ratios
from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import Columns, first_call, median, rows_table, spread


@dataclass(frozen=True)
class Target:
    """Target for the CPU time of one way relative to another."""

    name: str  # the way
    against: str  # what it is compared with
    limit: float  # the ratio's median may be this at most

    def judged(self, times: dict[str, Times]) -> dict[str, Any]:
        """Return the ratio in a run with its spread."""
        found = ratios(times[self.name].cpu, times[self.against].cpu)
        spread = {"p10": found.quantile(0.1), "p90": found.quantile(0.9)}
        return asdict(self) | {"ratio": found.median_ms, **spread, "passed": found.median_ms <= self.limit}


TARGETS = (
    Target("TrainStep", "flat list", 1.15),
    Target("TrainStep grouped", "flat list", 0.3),
    Target("make_train_step", "flat list", 1.5),
    Target("cached_filter_jit", "filter_jit", 0.25),
    Target("cached_filter_jit", "filter_jit patched", 0.5),
    Target("cached_filter_jit donated", "filter_jit donated", 0.25),
    Target("cached_filter_jit donated", "filter_jit patched, donated", 0.5),
)


def judged(times: dict[str, Times]) -> list[dict[str, Any]]:
    """Return every target whose ways were measured."""
    return [t.judged(times) for t in TARGETS if t.name in times and t.against in times]


def break_even(first_ms: float, step_ms: float, other_first_ms: float, other_step_ms: float) -> float | None:
    """Return the steps after which the first of two ways, slower to start, is ahead; None for never."""
    saved = other_step_ms - step_ms
    return max(0.0, (first_ms - other_first_ms) / saved) if saved > 0 else None


def title(result: CaseResult) -> str:
    """Return the case and its conditions in one line."""
    said = (f"{k} {v}" for k, v in result.conditions.items() if isinstance(v, str | int | float))
    return f"{result.case}: {', '.join(said)}"


def _ratio(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row.extra[name]['ratio']:.3f}" if name in row.extra else ""


def _host_spread(row: Row) -> str:
    return f"{row.timing.quantile(0.1):.3f}-{row.timing.quantile(0.9):.3f}"


def _break_even(row: Row) -> str:
    """Return the number of steps until an implementation pays off, or an empty text if it is compared with none."""
    if "break_even" not in row.extra:
        return ""
    steps = row.extra["break_even"]
    return "never" if steps is None else f"{steps:,.0f} steps"


HOST: Columns = (
    *(("way", lambda row: row.name), ("cpu ms", lambda row: f"{row.timing.median_ms:.3f}"), ("p10-p90", _host_spread)),
    ("host ms", lambda row: f"{row.extra['host']['median_ms']:.3f}"),
    ("ready ms", lambda row: f"{row.extra['ready']['median_ms']:.3f}"),
    *(("x flat", _ratio("over_flat")), ("first s", first_call), ("break-even", _break_even)),
)
STEP: Columns = (
    *(("way", lambda row: row.name), ("waited ms", median), ("p10-p90", spread), ("x bare", _ratio("over_bare"))),
    ("in a loop", lambda row: f"{row.extra['free']['median_ms']:.2f}"),
    ("x bare", _ratio("free_over_bare")),
    ("cpu ms", lambda row: f"{row.extra['cpu']['median_ms']:.2f}"),
    *(("x bare", _ratio("cpu_over_bare")), ("first s", first_call), ("break-even", _break_even)),
    ("within 1 %", lambda row: row.extra["within"]),
)


def host_table(result: CaseResult) -> Table:
    """Build the table of ways: CPU time, time until return and until done, relative to the flat list."""
    return rows_table(title(result), HOST, [row for row in result.rows if "host" in row.extra])


def parts_table(result: CaseResult) -> Table:
    """Build the table of the work on the trees before and after a step."""
    columns = (("part", HOST[0][1]), *HOST[1:3])
    return rows_table("of which, alone", columns, [row for row in result.rows if row.extra.get("part")])


def target_lines(result: CaseResult) -> list[str]:
    """Return a line per target with the measured value."""
    return [
        f"{'pass' if t['passed'] else 'FAIL'}  {t['name']} / {t['against']}: {t['ratio']:.3f} "
        f"({t['p10']:.3f}-{t['p90']:.3f}), at most {t['limit']:g}"
        for t in result.conditions.get("targets", [])
    ]


def fit_lines(result: CaseResult) -> list[str]:
    """Return a line per way with the growth of its time with the number of arrays, or its saving in a loop."""
    lines = []
    for name, fit in result.conditions.get("fits", {}).items():
        within = f", within {fit['worst']:.0%}" if "worst" in fit else ""
        lines.append(
            f"{name}: {fit['us_per_array']:.2f} us an array, {fit['ms_at_none'] * 1e3:+.0f} us besides{within}"
        )
    saved = result.conditions.get("savings", {})
    return lines + [f"{name}: {share:.1%} of filter_jit's loop saved" for name, share in saved.items()]


def step_table(result: CaseResult) -> Table:
    """Build the table of ways: blocking steps and steps in a loop, relative to the bare executable."""
    return rows_table(title(result), STEP, result.rows)

"""Results of the step's bench as tables for people."""

from typing import Any

from rich.table import Table

from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import blank_table, spread

HOST = ("way", "cpu ms", "p10-p90", "host ms", "ready ms", "x flat", "first s", "break-even")
STEP = (
    *("way", "waited ms", "p10-p90", "x bare", "in a loop", "x bare", "cpu ms", "x bare"),
    *("first s", "break-even", "within 1 %"),
)


def title(result: CaseResult) -> str:
    """The case and its conditions in one line."""
    said = (f"{k} {v}" for k, v in result.conditions.items() if isinstance(v, str | int | float))
    return f"{result.case}: {', '.join(said)}"


def _steps(steps: float | None) -> str:
    return "never" if steps is None else f"{steps:,.0f} steps"


def _ratio(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['ratio']:.3f}"


def host_table(result: CaseResult) -> Table:
    """One line a way: processor time, the time until it came back and until it was done, over the flat list's."""
    table = blank_table(title(result), HOST)
    for row in result.rows:
        if "host" in row.extra:
            table.add_row(*_host_cells(row))
    return table


def _host_cells(row: Row) -> tuple[str, ...]:
    t, extra = row.timing, row.extra
    return (
        row.name,
        f"{t.median_ms:.3f}",
        f"{t.quantile(0.1):.3f}-{t.quantile(0.9):.3f}",
        f"{extra['host']['median_ms']:.3f}",
        f"{extra['ready']['median_ms']:.3f}",
        _ratio(extra.get("over_flat")),
        f"{t.first_ms / 1e3:.1f}",
        _steps(extra["break_even"]) if "break_even" in extra else "",
    )


def parts_table(result: CaseResult) -> Table:
    """What happens to the trees before and after a step."""
    table = blank_table("of which, alone", ("part", "cpu ms", "p10-p90"))
    for row in result.rows:
        if row.extra.get("part"):
            t = row.timing
            table.add_row(row.name, f"{t.median_ms:.3f}", f"{t.quantile(0.1):.3f}-{t.quantile(0.9):.3f}")
    return table


def target_lines(result: CaseResult) -> list[str]:
    """Every target with what was reached."""
    return [
        f"{'pass' if t['passed'] else 'FAIL'}  {t['name']} / {t['against']}: {t['ratio']:.3f} "
        f"({t['p10']:.3f}-{t['p90']:.3f}), at most {t['limit']:g}"
        for t in result.conditions.get("targets", [])
    ]


def fit_lines(result: CaseResult) -> list[str]:
    """How each way's time grows with the number of arrays."""
    return [
        f"{name}: {fit['us_per_array']:.2f} us an array, {fit['ms_at_none'] * 1e3:+.0f} us besides"
        for name, fit in result.conditions.get("fits", {}).items()
    ]


def step_table(result: CaseResult) -> Table:
    """One line a way: each step waited for, and in a loop that waits at its end, over the bare executable's."""
    table = blank_table(title(result), STEP)
    for row in result.rows:
        t, extra = row.timing, row.extra
        table.add_row(
            row.name,
            f"{t.median_ms:.2f}",
            spread(row),
            _ratio(extra["over_bare"]),
            f"{extra['free']['median_ms']:.2f}",
            _ratio(extra["free_over_bare"]),
            f"{extra['cpu']['median_ms']:.2f}",
            _ratio(extra["cpu_over_bare"]),
            f"{t.first_ms / 1e3:.1f}",
            _steps(extra["break_even"]) if "break_even" in extra else "",
            extra["within"],
        )
    return table

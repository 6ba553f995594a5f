"""The tables of the step's bench."""

from collections.abc import Iterator

from rich.table import Table

from benchmarks.cases.meanflow.step_sections import BATCHES, FLOW_MATCHING, counts_of, name_of
from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import blank_table, gib, legend, spread
from fullstride.measure.roofline import marked

COLUMNS = (
    "batch",
    "by",
    "ms",
    "p10-p90",
    "bound",
    "x bound",
    "x FM",
    "at least",
    "GiB",
    "x FM's GiB",
    "first s",
    "error",
)


def compare(rows: list[Row]) -> None:
    """Add to each row what it is in terms of flow matching.

    `over_flow_matching` is its time over that of the fastest flow-matching step of the same batch by any backend, and
    `memory_over_flow_matching` its memory over flow matching's by the same backend.
    """
    fastest: dict[int, Row] = {}
    memory: dict[tuple[int, str], int] = {}
    for row in (r for r in rows if r.extra["name"] == FLOW_MATCHING):
        size, peak = row.extra["batch"], row.timing.peak_bytes
        if size not in fastest or row.timing.median_ms < fastest[size].timing.median_ms:
            fastest[size] = row
        if peak:
            memory[size, row.extra["backend"]] = peak
    for row in rows:
        extra, peak = row.extra, row.timing.peak_bytes
        extra["ms_per_sample"] = row.timing.median_ms / extra["batch"]
        if (best := fastest.get(extra["batch"])) is not None:
            extra["over_flow_matching"] = row.timing.median_ms / best.timing.median_ms
            extra["flow_matching_by"] = best.extra["backend"]
        if peak and (beside := memory.get((extra["batch"], extra["backend"]))):
            extra["memory_over_flow_matching"] = peak / beside


def tables(result: CaseResult, sections: tuple[str, ...]) -> Iterator[Table]:
    """All rows, and what the chosen sections show besides."""
    yield _all_rows(result)
    if "scaling" in sections:
        yield _scaling(result)
    if "batches" in sections:
        yield _batches(result)
    if profiles := [row for row in result.rows if "profile" in row.extra]:
        yield _groups(profiles)
        for row in profiles:
            yield _kernels(row)


def _all_rows(result: CaseResult) -> Table:
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if k != "left_out")
    by = {r.extra["flow_matching_by"] for r in result.rows if "flow_matching_by" in r.extra}
    against = f"\nx FM: of the fastest {FLOW_MATCHING} step of this run, by {', '.join(sorted(by))}" if by else ""
    out = blank_table(f"{result.case}: {conditions}", ("step", *COLUMNS), f"{legend(result)}{against}")
    for row in sorted(result.rows, key=lambda r: _place(r, result.rows)):
        out.add_row(*_cells(row))
    return out


def _place(row: Row, rows: list[Row]) -> tuple[int, int]:
    """Rows of one case together, in the order in which cases and backends came."""
    names = [(r.extra["batch"], r.extra["name"]) for r in rows]
    return names.index((row.extra["batch"], row.extra["name"])), rows.index(row)


def _cells(row: Row) -> tuple[str, ...]:
    t, x = row.timing, row.extra
    is_step = "ratio" in x
    return (
        x["name"],
        str(x["batch"]),
        x["backend"],
        f"{t.median_ms:.2f}",
        spread(row),
        f"{row.floor.ms:.2f}",
        marked(f"{row.over_floor:.2f}", row.over_floor),
        f"{x['over_flow_matching']:.2f}" if is_step and "over_flow_matching" in x else "",
        f"{x['forwards'] / 3:.2f}" if is_step else "",
        gib(t.peak_bytes),
        f"{x['memory_over_flow_matching']:.2f}" if is_step and "memory_over_flow_matching" in x else "",
        f"{t.first_ms / 1e3:.1f}",
        f"{max(x['errors'].values()):.1e}",
    )


def _scaling(result: CaseResult) -> Table:
    """Time by how many samples are in the JVP, and that over what it would be in proportion to the fewest."""
    size = result.conditions["batch_size"]
    counts = counts_of(size)
    out = blank_table("scaling with the samples in the JVP", ("", "by", *(f"{n} of {size}" for n in counts)))
    found = {(r.extra["name"], r.extra["batch"], r.extra["backend"]): r.timing.median_ms for r in result.rows}
    for backend in dict.fromkeys(r.extra["backend"] for r in result.rows):
        steps = [found.get((name_of(share), size, backend)) for share in counts.values()]
        passes = [found.get(("JVP", n, backend)) for n in counts]
        for name, times in (("step, ms (x linear)", steps), ("JVP alone, ms (x linear)", passes)):
            out.add_row(name, backend, *_beside_linear(times, list(counts)))
    return out


def _beside_linear(times: list[float | None], counts: list[int]) -> list[str]:
    first = times[0]
    cells = []
    for ms, n in zip(times, counts, strict=True):
        linear = "" if ms is None or first is None else f" ({ms / first / (n / counts[0]):.2f})"
        cells.append("" if ms is None else f"{ms:.2f}{linear}")
    return cells


def _batches(result: CaseResult) -> Table:
    out = blank_table("milliseconds an image", ("", "by", *(f"batch {n}" for n in BATCHES)))
    found = {(r.extra["name"], r.extra["backend"], r.extra["batch"]): r.extra["ms_per_sample"] for r in result.rows}
    for name in (FLOW_MATCHING, name_of(1.0)):
        for backend in dict.fromkeys(r.extra["backend"] for r in result.rows):
            cells = [found.get((name, backend, n)) for n in BATCHES]
            out.add_row(name, backend, *("" if ms is None else f"{ms:.4f}" for ms in cells))
    return out


def _groups(rows: list[Row]) -> Table:
    """Milliseconds on the device and shares, by what kernels do."""
    names = tuple(f"{r.extra['name']}, {r.extra['backend']}" for r in rows)
    by = {(r.extra["name"], r.extra["backend"]): r.extra["profile"] for r in rows}
    pairs = [(by.get((name_of(1.0), b)), by.get((FLOW_MATCHING, b)), b) for b in dict.fromkeys(b for _, b in by)]
    added = [(f"the JVP adds, {b}", a["groups"], c["groups"]) for a, c, b in pairs if a and c]
    out = blank_table(
        "profile: ms on the device by kernels of a kind (share)", ("", *names, *(name for name, *_ in added))
    )
    profiles = [r.extra["profile"] for r in rows]
    for group in profiles[0]["groups"]:
        shares = (f"{p['groups'][group]:.2f} ({p['groups'][group] / p['ms']:.0%})" for p in profiles)
        out.add_row(group, *shares, *(f"{a[group] - c[group]:+.2f}" for _, a, c in added))
    out.add_row("together", *(f"{p['ms']:.2f}" for p in profiles))
    out.add_row("launches", *(f"{p['launches']:.0f}" for p in profiles))
    return out


def _kernels(row: Row) -> Table:
    out = blank_table(
        f"longest kernels of {row.extra['name']}, {row.extra['backend']}", ("kernel", "kind", "ms", "launches")
    )
    for kernel in row.extra["profile"]["kernels"]:
        out.add_row(kernel["name"][:110], kernel["group"], f"{kernel['ms']:.3f}", f"{kernel['launches']:.0f}")
    return out

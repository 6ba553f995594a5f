"""Tables of the step benchmark."""

from collections.abc import Callable, Iterator

from rich.table import Table

from benchmarks.cases.meanflow.step_sections import BATCHES, FLOW_MATCHING, counts_of, name_of
from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import BOUND, Columns, blank_table, first_call, legend, median, peak, rows_table, spread


def _of_steps(name: str) -> Callable[[Row], str]:
    """Return a column for a ratio that steps have and passes do not."""
    return lambda row: f"{row.extra[name]:.2f}" if "ratio" in row.extra and name in row.extra else ""


COLUMNS: Columns = (
    *(("step", lambda row: row.extra["name"]), ("batch", lambda row: str(row.extra["batch"]))),
    *(("by", lambda row: row.extra["backend"]), ("ms", median), ("p10-p90", spread), *BOUND),
    ("x FM", _of_steps("over_flow_matching")),
    ("at least", lambda row: f"{row.extra['forwards'] / 3:.2f}" if "ratio" in row.extra else ""),
    *(("GiB", peak), ("x FM's GiB", _of_steps("memory_over_flow_matching")), ("first s", first_call)),
    ("error", lambda row: f"{max(row.extra['errors'].values()):.1e}"),
)


def compare(rows: list[Row]) -> None:
    """Add to each row its ratios to flow matching.

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
    """Build the table of all rows, and the tables of the chosen sections."""
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if k != "left_out")
    by = {r.extra["flow_matching_by"] for r in result.rows if "flow_matching_by" in r.extra}
    against = f"\nx FM: of the fastest {FLOW_MATCHING} step of this run, by {', '.join(sorted(by))}" if by else ""
    # Rows of one case together, in the order in which cases and backends came.
    cases = [(row.extra["batch"], row.extra["name"]) for row in result.rows]
    rows = sorted(result.rows, key=lambda row: cases.index((row.extra["batch"], row.extra["name"])))
    yield rows_table(f"{result.case}: {conditions}", COLUMNS, rows, f"{legend(result)}{against}")
    if "scaling" in sections:
        yield _scaling(result)
    if "batches" in sections:
        yield _batches(result)
    if profiles := [row for row in result.rows if "profile" in row.extra]:
        yield _groups(profiles)
        for row in profiles:
            yield _kernels(row)


def _scaling(result: CaseResult) -> Table:
    """Build the table of time by samples in the JVP, compared with proportional scaling from the fewest."""
    size = result.conditions["batch_size"]
    counts = counts_of(size)
    out = blank_table("scaling with the samples in the JVP", ("", "by", *(f"{n} of {size}" for n in counts)))
    found = {(r.extra["name"], r.extra["batch"], r.extra["backend"]): r.timing.median_ms for r in result.rows}
    for backend in dict.fromkeys(r.extra["backend"] for r in result.rows):
        steps = [found.get((name_of(share), size, backend)) for share in counts.values()]
        passes = [found.get(("JVP", n, backend)) for n in counts]
        for name, times in (("step, ms (x linear)", steps), ("JVP alone, ms (x linear)", passes)):
            cells, fewest = [], min(counts)
            for ms, n in zip(times, counts, strict=True):
                linear = "" if ms is None or times[0] is None else f" ({ms / times[0] / (n / fewest):.2f})"
                cells.append("" if ms is None else f"{ms:.2f}{linear}")
            out.add_row(name, backend, *cells)
    return out


def _batches(result: CaseResult) -> Table:
    out = blank_table("milliseconds an image", ("", "by", *(f"batch {n}" for n in BATCHES)))
    found = {(r.extra["name"], r.extra["backend"], r.extra["batch"]): r.extra["ms_per_sample"] for r in result.rows}
    for name in (FLOW_MATCHING, name_of(1.0)):
        for backend in dict.fromkeys(r.extra["backend"] for r in result.rows):
            cells = [found.get((name, backend, n)) for n in BATCHES]
            out.add_row(name, backend, *("" if ms is None else f"{ms:.4f}" for ms in cells))
    return out


def _groups(rows: list[Row]) -> Table:
    """Build the table of device milliseconds and shares by group of kernels."""
    names = tuple(f"{r.extra['name']}, {r.extra['backend']}" for r in rows)
    by = {(r.extra["name"], r.extra["backend"]): r.extra["profile"] for r in rows}
    pairs = [(by.get((name_of(1.0), b)), by.get((FLOW_MATCHING, b)), b) for b in dict.fromkeys(b for _, b in by)]
    added = [(f"the JVP adds, {b}", a["groups"], c["groups"]) for a, c, b in pairs if a and c]
    title = "profile: ms on the device by kernels of a kind (share)"
    out = blank_table(title, ("", *names, *(name for name, *_ in added)))
    profiles = [r.extra["profile"] for r in rows]
    for group in profiles[0]["groups"]:
        shares = (f"{p['groups'][group]:.2f} ({p['groups'][group] / p['ms']:.0%})" for p in profiles)
        out.add_row(group, *shares, *(f"{a[group] - c[group]:+.2f}" for _, a, c in added))
    out.add_row("together", *(f"{p['ms']:.2f}" for p in profiles))
    out.add_row("launches", *(f"{p['launches']:.0f}" for p in profiles))
    return out


def _kernels(row: Row) -> Table:
    title = f"longest kernels of {row.extra['name']}, {row.extra['backend']}"
    out = blank_table(title, ("kernel", "kind", "ms", "launches"))
    for kernel in row.extra["profile"]["kernels"]:
        out.add_row(kernel["name"][:110], kernel["group"], f"{kernel['ms']:.3f}", f"{kernel['launches']:.0f}")
    return out

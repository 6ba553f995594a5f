"""Decode steps by batch and context, and by devices: sections of the case `llm` whose rows are steps, not workloads."""

from collections.abc import Sequence

from benchmarks.report.bounded import Bounded, bounded
from benchmarks.report.drawing import Drawn
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each, over_bound

SWEEP, SHARED = "sweep", ("parallel", "replicas")
PACKAGES = ("jax", "jaxlib")
MOST_LINES = 5


def is_steps(result: Result) -> bool:
    """Whether a result is of this page's sections."""
    return result.conditions.get("section") in (SWEEP, *SHARED)


def _speed(row: Measurement) -> float:
    return float(row.extra["tokens_per_second"])


def pool_of(result: Result) -> str:
    """What keys and values were kept as, if that is not the weights' dtype."""
    kept = result.conditions.get("kv_cache_dtype")
    return f", keys and values in {kept}" if kept else ""


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result: every step with its speed and its roofline bound."""

    def caption(result: Result) -> str:
        return f"Decode steps ({conditions(result)})."

    header = ("devices", "sequences", "context", "kernels", "ms a step", "bound ms", "x bound", "tokens/s")
    return one_each(results, judge, PACKAGES, header, caption, _cells, text=0)


def _cells(row: Measurement) -> list[Cell]:
    sizes = [str(row.extra.get("devices", 1)), str(row.extra["batch"]), str(row.extra["context"] or "")]
    times = [number(row.median), number(row.floor), over_bound(row)]
    return [*sizes, row.extra.get("kernels", ""), *times, number(_speed(row))]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Tokens a second against sequences by context, and against devices."""
    swept = [r for r in results if r.conditions.get("section") == SWEEP]
    shared = [r for r in results if r.conditions.get("section") in SHARED]
    return [*(_roofline(r, place) for place, r in enumerate(swept)), *(_speed_up(r, i) for i, r in enumerate(shared))]


def _roofline(result: Result, place: int) -> Drawn:
    speeds: dict[int, dict[int, float]] = {}
    bounds: dict[int, dict[int, float]] = {}
    for row in result.rows:
        context, batch = row.extra["context"], row.extra["batch"]
        speeds.setdefault(context, {})[batch] = _speed(row)
        bounds.setdefault(context, {})[batch] = _speed(row) * row.over_floor
    shown = sorted(speeds)[:MOST_LINES]
    series = [Bounded(f"context {context:,}", speeds[context], bounds[context]) for context in shown]
    figure = bounded(series, "sequences in a step", "tokens a second (log)", log_y=True)
    told = result.conditions
    of = f"{told.get('model')}, kernels {told.get('kernels')}{pool_of(result)}, {result.machine}"
    caption = (
        "Decode steps: tokens a second by sequences and context; dashed, what reading the weights and each context "
        f"once at the copy rate would allow. {of}."
    )
    return Drawn(f"llm-sweep-{place}", caption, figure, "Tokens a second of decode steps by batch and context")


def _speed_up(result: Result, place: int) -> Drawn:
    found: dict[str, dict[int, float]] = {}
    for row in result.rows:
        context = f", context {row.extra['context']:,}" if row.extra["context"] else ""
        several = "s" * (row.extra["batch"] != 1)
        own = found.setdefault(f"{row.extra['batch']} sequence{several}{context}", {})
        # The first of several sets of kernels is what the others are compared with.
        own.setdefault(row.extra["devices"], row.extra["speed_up"])
    series = [Bounded(name, values) for name, values in list(found.items())[:MOST_LINES]]
    devices = sorted({x for values in found.values() for x in values})
    series[0] = Bounded(series[0].name, series[0].values, {x: x / devices[0] for x in devices})
    kind = {"parallel": "one model over them", "replicas": "an engine on each"}[result.conditions["section"]]
    figure = bounded(series, "devices", "x the tokens a second of the fewest")
    caption = (
        f"What more devices bring, {kind}; dashed: in proportion. {result.conditions.get('model')}, {result.machine}."
    )
    return Drawn(f"llm-devices-{place}", caption, figure, "Speed-up of decode steps by devices")

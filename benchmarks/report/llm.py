"""Tokens a second of the language model engine."""

from collections.abc import Sequence

from benchmarks.report import decoding
from benchmarks.report.case import TIMING, Case, Finding, first
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, all_in_one, number, over_bound

PACKAGES = ("jax", "jaxlib")
BOUND = "at the bound"
# Files of its workloads.
PARTS = (
    "beside",
    "devices",
    "latency",
    "parallel",
    "replicas",
    "shared",
    "sweep",
    "transformers_side",
    "vllm_side",
    "work",
)


def _spoken(result: Result) -> list[Measurement]:
    """Its workloads' rows; steps have tables and figures of their own."""
    return [] if decoding.is_steps(result) else [row for row in result.rows if "tokens_per_second" in row.extra]


def headline(result: Result) -> Measurement:
    """The first row that decodes or reads a prompt: no reading of weights is the floor of a process's start."""
    if result.conditions.get("section") != "latency":
        return first(result)
    return next((row for row in result.rows if row.name.startswith("first token")), first(result))


def rate(row: Measurement) -> float:
    """Tokens a second."""
    return float(row.extra["tokens_per_second"])


def limit(row: Measurement) -> float:
    """Tokens a second if the row took its floor."""
    return rate(row) * row.over_floor


def _name(result: Result) -> str:
    c = result.conditions
    kernels = f", kernels {c.get('kernels')}" if "kernels" in c else ""
    return f"{c.get('model')}, {c.get('section')}, {c.get('precision')}{kernels}{decoding.pool_of(result)}"


def finding(results: Sequence[Result]) -> Finding | None:
    """The fastest workload that others ran, too, of a GPU if there is one."""
    beside = [result for result in results if len(_spoken(result)) > 1]
    beside = [result for result in beside if result.data["device"] != "cpu"] or beside
    if not beside:
        return None
    result = max(beside, key=lambda result: rate(_spoken(result)[0]))
    ours, *others = _spoken(result)
    best = max(others, key=rate)
    text = f"tokens a second, {number(rate(ours) / rate(best), 3)} x those of {best.name}"
    return Finding(number(rate(ours)), f"{text}: {_name(result)}, {result.machine}")


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """All workloads, and decode steps by themselves."""
    header = ("workload", "engine", "tokens/s", "at the bound", "x bound", "median ms", "bound ms")
    caption = (
        "Whole workloads: small is 4 prompts of 100 new tokens each, large as many sequences as its conditions say."
    )
    workloads = all_in_one(results, judge, PACKAGES, header, caption, _cells, _spoken)
    return [*workloads, *decoding.tables([r for r in results if decoding.is_steps(r)], judge)]


def _cells(result: Result, row: Measurement) -> list[Cell]:
    return [_name(result), row.name, *_numbers(row)]


def _numbers(row: Measurement) -> list[str]:
    return [number(rate(row)), number(limit(row)), over_bound(row), number(row.median), number(row.floor)]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Tokens a second by workload next to its roofline bound's, and of decode steps."""
    return [*_workloads(results), *decoding.figures([r for r in results if decoding.is_steps(r)])]


def _workloads(results: Sequence[Result]) -> list[Drawn]:
    series: dict[str, dict[str, float]] = {}
    for result in results:
        label = f"{_name(result)}: {result.machine}"
        for row in _spoken(result):
            series.setdefault(row.name, {})[label] = rate(row)
            series.setdefault(BOUND, {})[label] = limit(row)
    if not series:
        return []
    shown = [Series(name, values, bound=name == BOUND) for name, values in series.items()]
    figure = dots(shown, "tokens a second (log)", log=True, joined=True)
    caption = (
        "Tokens a second of whole workloads, prompts included, beside what reading weights and caches at the copy rate "
        "of the same run would allow."
    )
    return [Drawn("llm-tokens", caption, figure, "Tokens a second by workload and engine")]


CASE = Case(
    name="llm",
    title="Language models",
    about="The paged-attention engine beside transformers' generate and vLLM, by the bound of what decoding must read.",
    paths=(
        "fullstride/llm/engine",
        "fullstride/llm/kernels",
        "fullstride/llm/models",
        *(f"benchmarks/cases/llm/{name}.py" for name in ("case", *PARTS)),
        "fullstride/llm/server/request_manager.py",
        "fullstride/llm/server/engine_thread.py",
        "fullstride/llm/server/replicas.py",
        "benchmarks/cases/step_jax/ceilings.py",
        *TIMING,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)

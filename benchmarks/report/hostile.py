"""How long clients of the HTTP server wait while others send it the worst requests."""

from collections.abc import Mapping, Sequence

from benchmarks.report.case import TIMING, Case, Finding, first_on_gpu
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each

PACKAGES = ("jax", "jaxlib")
SPREAD = ("median", "p99", "max")


def _p99(row: Measurement) -> float:
    return float(row.extra["health_ms"]["p99"])


def headline(result: Result) -> Measurement:
    """The attack under which /health takes longest."""
    return max(result.rows, key=_p99)


def finding(results: Sequence[Result]) -> Finding | None:
    """The headline of the first result on a GPU's machine, else of the first, beside the idle server."""
    result = first_on_gpu(results)
    worst = headline(result)
    text = f"the 99th percentile of /health under the worst attack ({worst.name}), {number(_p99(result.rows[0]))} idle"
    return Finding(f"{number(_p99(worst))} ms", f"{text}: {result.conditions.get('model')}, {result.machine}")


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result: both kinds of small requests, and the attack's."""

    def caption(result: Result) -> str:
        return f"Completions of one token, and /health, from processes of their own, in ms ({conditions(result)})."

    small = (*SPREAD, *(f"/health {name}" for name in SPREAD))
    header = ("meanwhile", *small, "attacks/s", "answers")
    return one_each(results, judge, PACKAGES, header, caption, _cells)


def _cells(row: Measurement) -> list[Cell]:
    return [row.name, *waits(row), *attacks(row)]


def waits(row: Measurement) -> list[str]:
    """Milliseconds of the completions, then of /health."""
    return [number(row.extra[kind][name]) for kind in ("request_ms", "health_ms") for name in SPREAD]


def attacks(row: Measurement) -> list[str]:
    """Attacks a second, and how many got which status; nothing of the idle server."""
    answers: Mapping[str, int] = row.extra.get("attack_answers", {})
    told = ", ".join(f"{count:,} x {status}" for status, count in answers.items())
    return [number(row.extra.get("attacks_per_second"), 3), told]


CASE = Case(
    name="llm-hostile",
    title="Serving under attack",
    about="Small requests to the HTTP server while other clients send it the costliest ones that it reads.",
    paths=(
        "fullstride/llm/engine",
        "fullstride/llm/kernels",
        "fullstride/llm/models",
        "fullstride/llm/server",
        "fullstride/llm/text/chat_template.py",
        "fullstride/llm/text/confined.py",
        "fullstride/llm/text/grammar_trial.py",
        "fullstride/llm/text/rendering.py",
        *(f"benchmarks/cases/llm/{name}.py" for name in ("attacks", "hostile", "hostile_clients", "shared", "sweep")),
        "fullstride/llm/text/tokenizer.py",
        *("benchmarks/cases/step_jax/ceilings.py", *TIMING),
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
)

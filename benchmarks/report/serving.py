"""What clients of the HTTP server get, by how many there are."""

from collections.abc import Sequence

from benchmarks.report.bounded import Bounded, bounded
from benchmarks.report.case import TIMING, Case, Finding
from benchmarks.report.drawing import Drawn
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each

PACKAGES = ("jax", "jaxlib")


def headline(result: Result) -> Measurement:
    """Of most clients."""
    return max(result.rows, key=lambda row: row.extra["batch"])


def finding(results: Sequence[Result]) -> Finding | None:
    """How much of the engine's speed the server keeps with most clients, of a GPU if there is one."""
    result = next((r for r in results if r.data["device"] != "cpu"), results[0])
    row = headline(result)
    told = f"of the engine's tokens a second reach {row.extra['batch']} clients of its server"
    return Finding(_share(row), f"{told}: {result.conditions.get('model')}, {result.machine}")


def _share(row: Measurement) -> str:
    return f"{100 * row.extra['share_of_the_engine']:.0f} %"


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result: first tokens, the pace after them, and the engine alone."""

    def caption(result: Result) -> str:
        c = result.conditions
        lengths = f"prompts of {c.get('prompt')} and answers of {c.get('answer')} tokens, streamed"
        return f"Clients of the HTTP server, in a process of their own: {lengths} ({conditions(result)})."

    firsts, pace = ("first token ms", "p99", "bound ms"), ("ms a token", "bound ms")
    header = ("clients", *firsts, *pace, "tokens/s", "the engine alone", "share")
    return one_each(results, judge, PACKAGES, header, caption, _cells, text=0)


def _cells(row: Measurement) -> list[Cell]:
    extra, first = row.extra, row.extra["first_token_ms"]
    speeds = [number(extra["tokens_per_second"]), number(extra["engine_tokens_per_second"])]
    waited = [number(ms) for ms in (first["median"], first["p99"], extra["first_token_floor_ms"])]
    return [str(extra["batch"]), *waited, number(row.median), number(row.floor), *speeds, _share(row)]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Tokens a second by clients, of the server and of the engine alone."""
    return [_drawn(result, place) for place, result in enumerate(results)]


def _drawn(result: Result, place: int) -> Drawn:
    lines = {"the engine alone": "engine_tokens_per_second", "through the server": "tokens_per_second"}
    series = [Bounded(name, {row.extra["batch"]: row.extra[key] for row in result.rows}) for name, key in lines.items()]
    c = result.conditions
    caption = (
        f"Tokens a second by clients at once, each asking one question after the other: {c.get('model')}, prompts of "
        f"{c.get('prompt')} and answers of {c.get('answer')} tokens, {result.machine}."
    )
    figure = bounded(series, "clients at once", "tokens a second (log)", log_y=True)
    return Drawn(f"llm-serve-{place}", caption, figure, "Tokens a second by clients of the server")


CASE = Case(
    name="llm-serve",
    title="Serving",
    about="Streamed answers over HTTP by clients at once, beside the engine alone with as many prompts.",
    paths=(
        "fullstride/llm/engine",
        "fullstride/llm/kernels",
        "fullstride/llm/models",
        "fullstride/llm/server",
        *(f"benchmarks/cases/llm/{name}.py" for name in ("clients", "serve", "shared", "sweep", "work")),
        *("benchmarks/cases/step_jax/ceilings.py", *TIMING),
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)

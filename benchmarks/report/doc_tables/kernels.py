"""The tables of the documentation about the engine's kernels, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.report.doc_tables import forms
from benchmarks.report.llm import rate
from benchmarks.report.markdown import MarkdownTable, the_result, the_row
from benchmarks.report.paged import share
from benchmarks.report.reading import Folder, Result

PACKAGES = ("jax",)
# Heads of a model, the contexts of its rows, and what else is not as usual.
ATTENTION = (
    {"model": "32-8-heads-of-128", "section": "contexts-500-2048"},
    {"model": "16-8-heads-of-128", "section": "contexts-300-500", "at": "batch-8-64-256-block-16"},
)


# What stands beside it, by how the names of its rows begin; a column where it ran at all.
BESIDE = {"gather": "gather in plain JAX", "JAX's Pallas": "JAX's Pallas kernel"}


def paged(shapes: Sequence[Mapping[str, str]], folder: Folder) -> MarkdownTable:
    """Attention of decode steps in microseconds, beside a copy's rate, a gather in plain JAX and JAX's own kernel."""
    asked = ({**shape, "precision": "bfloat16", "device": "cuda"} for shape in shapes)
    results = [the_result(folder, "paged-attention", **conditions) for conditions in asked]
    ran = [way for way in BESIDE if any(f": {way}" in row.name for result in results for row in result.rows)]
    times = ("bound", "XLA's launches", "in a chain", "of the copy rate", *(BESIDE[way] for way in ran))
    table = MarkdownTable(("heads / key heads", "contexts", "batch", *times), text=2, packages=PACKAGES)
    for result in results:
        for batch in dict.fromkeys(row.name.partition(":")[0] for row in result.rows):
            table.add(*_attention(result, batch), *(_fastest(result, f"{batch}: {way}") for way in ran), of=result)
    return table


def _fastest(result: Result, begins: str) -> str:
    """Microseconds of the fastest of rows whose names begin so; not all were timed for all shapes."""
    times = [row.median for row in result.rows if row.name.startswith(begins)]
    return f"{1e3 * min(times):,.0f}" if times else ""


def _attention(result: Result, batch: str) -> tuple[str, ...]:
    """Cells of a batch, which is as in `batch 8`."""
    launched, chained = (the_row(result, f"{batch}: {way}") for way in ("paged", "in a chain"))
    heads, key_heads = result.conditions["model"].split("-")[:2]
    contexts = result.conditions["section"].removeprefix("contexts-")
    times = (f"{1e3 * ms:.1f}" for ms in (chained.floor, launched.median, chained.median))
    sizes = (f"{heads} / {key_heads}, block {result.conditions['block']}", contexts, batch.removeprefix("batch "))
    return *sizes, *times, f"{share(chained):.0f} %"


def sweep(kernels: str, pool: str | None, folder: Folder) -> MarkdownTable:
    """Tokens a second of decode steps by batch and context, and their share of the bound."""
    shape = {"model": "qwen3-0.6b", "precision": "bfloat16", "section": "sweep", "device": "cuda"}
    result = the_result(folder, "llm", kernels=kernels, kv_cache_dtype=pool, **shape)
    contexts, batches = (_sizes(result, key) for key in ("context", "batch"))
    table = MarkdownTable(("batch", *(f"context {n:,}" for n in contexts)), text=0, packages=PACKAGES)
    for batch in batches:
        cells = (_step(result, f"batch {batch}, context {context}") for context in contexts)
        table.add(str(batch), *cells, of=result)
    return table


def _sizes(result: Result, key: str) -> Sequence[int]:
    return sorted({row.extra[key] for row in result.rows})


def _step(result: Result, name: str) -> str:
    """A step's speed and share; nothing where it was left out."""
    if name in result.conditions["left_out"]:
        return ""
    row = the_row(result, name)
    return f"{rate(row):,.0f} ({100 / row.over_floor:.0f}%)"


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "paged-attention": partial(paged, ATTENTION),
    "paged-attention-32-8": partial(paged, ATTENTION[:1]),
    "llm-sweep-token": partial(sweep, "token", None),
    "llm-sweep-fp8": partial(sweep, "chained", "fp8"),
    **forms.TABLES,
}

"""The tables of the documentation about the engine's workloads, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.report.llm import limit, rate
from benchmarks.report.markdown import MarkdownTable, the_result, the_row
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.tables import number, over_bound

PACKAGES = ("jax",)
# Whose steps are of one prompt; all others' are of all prompts.
ALONE, OURS = "transformers, one by one", "fullstride"
SETS = ("plain", "paged", "token")
MODELS = {"qwen3-8b": "Qwen3-8B", "qwen3-0.6b": "Qwen3-0.6B"}
# Tokens a second that were wanted, and the sets that ran.
WORKLOADS = (
    ("small", "4 prompts, 100 tokens each: tokens/s", 5_000, SETS),
    ("large", "nano-vllm's 256 sequences: tokens/s", 20_000, ("plain", "token")),
)
# With transformers alone or vLLM, too; the engine's own numbers are those of a run without either as well.
BESIDE = (None, "beside-vllm")
WITH_AND_WITHOUT = (*BESIDE, "no-baseline", "no-baseline-beside-vllm")
STEPS = ((1, 128, 1_300), (64, 400, 45_000))
COMPILED = "programs compiled before"
# Milliseconds in a unit, and how many of these were wanted.
WAITS = (
    ("first token, prompt of 1024", "first token of a prompt of 1,024: ms", 1, 15),
    (f"start, process and all, {COMPILED}", f"start of a server's engine, {COMPILED}: s", 1e3, 30),
)


def small_on_cpu(folder: Folder) -> MarkdownTable:
    """Four prompts at once on a CPU."""
    return _beside(_plain(folder, model="smollm2", precision="float32", section="small", device="cpu"))


def small(kernels: str, folder: Folder) -> MarkdownTable:
    """Four prompts at once on a GPU, by a set of kernels."""
    return _beside(on_gpu(folder, "small", kernels, at=BESIDE))


def _beside(result: Result) -> MarkdownTable:
    """The engine and what stands beside it in the same run, transformers at least."""
    the_row(result, ALONE)
    header = ("", "median", "p10-p90", "ms a token of each", "tokens/s", "x bound")
    table = MarkdownTable(header, packages=(*PACKAGES, "transformers", "vllm"))
    for row in result.rows:
        speeds = (_a_step(row, result), number(rate(row)), over_bound(row))
        table.add("this engine" if row.name == OURS else row.name, *_times(row), *speeds, of=result)
    return table


def _a_step(row: Measurement, result: Result) -> str:
    """Milliseconds of the whole over its decode steps: what a prompt waits for a token, its own pass included."""
    at_once = 1 if row.name == ALONE else result.conditions["prompts"]
    return number(row.median * at_once / result.conditions["tokens"], 3)


def _times(row: Measurement) -> tuple[str, str]:
    """The median with its unit, and the percentiles in the same."""
    unit, scale, places = ("s", 1e3, 2) if row.median >= 1e3 else ("ms", 1.0, 1)
    median, low, high = (f"{ms / scale:.{places}f}" for ms in (row.median, row.p10, row.p90))
    return f"{median} {unit}", f"{low}-{high} {unit}"


def kernels(folder: Folder) -> MarkdownTable:
    """What the sets of kernels bring, beside what was wanted and what reading allows."""
    table = MarkdownTable(("", "wanted", *SETS, "bound"), packages=PACKAGES)
    for section, what, wanted, ran in WORKLOADS:
        found = {name: on_gpu(folder, section, name, at=WITH_AND_WITHOUT) for name in ran}
        speeds = {name: number(rate(the_row(result, OURS))) for name, result in found.items()}
        bound = number(limit(the_row(found["token"], OURS)))
        table.add(what, f"{wanted:,}", *_by_set(speeds), bound, of=list(found.values()))
    _steps(table, on_gpu(folder, "sweep", "token"))
    _waits(table, on_gpu(folder, "latency", "token"))
    return table


def _steps(table: MarkdownTable, result: Result) -> None:
    for batch, context, wanted in STEPS:
        row = the_row(result, f"batch {batch}, context {context}")
        speeds = _by_set({"token": number(rate(row))})
        table.add(f"batch {batch}, context {context}: tokens/s", f"{wanted:,}", *speeds, number(limit(row)), of=result)


def _waits(table: MarkdownTable, result: Result) -> None:
    for name, what, unit, wanted in WAITS:
        table.add(what, str(wanted), *_by_set({"token": f"{the_row(result, name).median / unit:.1f}"}), "", of=result)


def _by_set(speeds: Mapping[str, str]) -> tuple[str, ...]:
    """A cell for each set, in bold what `auto` takes there; nothing of those that did not run."""
    return tuple(f"**{speeds[name]}**" if name == "token" else speeds.get(name, "") for name in SETS)


def parallel(folder: Folder) -> MarkdownTable:
    """Decode steps on one GPU and on two."""
    header = ("shape, batch, context", "1 GPU, `token`", "1 GPU, `paged`", "**2 GPUs**", "speed-up")
    table = MarkdownTable(header, packages=PACKAGES)
    for model, shape in MODELS.items():
        conditions = {"model": model, "precision": "bfloat16", "section": "parallel", "device": "cuda"}
        result = the_result(folder, "llm", **conditions)
        for batch, context in dict.fromkeys((row.extra["batch"], row.extra["context"]) for row in result.rows):
            cells = _shared(result, f"batch {batch}, context {context}")
            table.add(f"{shape}, {batch}, {context}", *cells, of=result)
    return table


def _shared(result: Result, step: str) -> tuple[str, ...]:
    """A step by all that it was run on; larger models run on one GPU by `paged` alone."""
    token = [f"{row.median:.2f}" for row in result.rows if row.name == f"1 device, token, {step}"] or [""]
    one, two = (the_row(result, f"{devices}, paged, {step}") for devices in ("1 device", "2 devices"))
    return *token, f"{one.median:.2f}", f"**{two.median:.2f}**", f"{two.extra['speed_up']:.2f}"


def on_gpu(folder: Folder, section: str, kernels: str, **more: Any) -> Result:
    """The newest result of a section of `python -m benchmarks llm` on Qwen3-0.6B's shape, by a set of kernels.

    Raises:
        ConfigError: if there is none.

    """
    shape = {"model": "qwen3-0.6b", "precision": "bfloat16", "section": section, "device": "cuda", **more}
    if kernels == "plain":
        return _plain(folder, **shape)
    return the_result(folder, "llm", kernels=kernels, **shape)


def _plain(folder: Folder, **conditions: Any) -> Result:
    """By JAX alone, which older results do not name."""
    found = tuple(result for result in folder.results if result.conditions.get("kernels") in (None, "plain"))
    return the_result(replace(folder, results=found), "llm", **conditions)


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "llm-small-cpu": small_on_cpu,
    "llm-small-plain": partial(small, "plain"),
    "llm-small-token": partial(small, "token"),
    "llm-kernels": kernels,
    "llm-parallel": parallel,
}

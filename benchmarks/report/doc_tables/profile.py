"""The table of where a training step's time goes: the kernels that torch.profiler saw, by what they do."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.report.doc_tables.meanflow import BY_SHARE
from benchmarks.report.doc_tables.training import COMPILED, PACKAGES, steps_on_gpu
from benchmarks.report.markdown import MarkdownTable, the_row
from benchmarks.report.reading import Folder, Result
from fullstride.errors import ConfigError

# What the table calls the groups of `benchmarks/cases/meanflow/step_profile.py`.
KINDS = {
    "convolutions": "convolution",
    "matrix products": "matmul",
    "norms": "norm",
    "attention": "attention",
    "pointwise": "pointwise",
    "other": "other",
}
STEPS = ("FM MSE", "MeanFlow 100%")
Profile = Mapping[str, Any]


def profile(folder: Folder) -> MarkdownTable:
    """Both steps by kind of kernel, as they are written and compiled, and what the JVP adds to each kind."""
    results = (steps_on_gpu(folder, BY_SHARE), steps_on_gpu(folder, COMPILED))
    header = (f"{way}: {what}" for way in ("as written", "compiled") for what in ("FM", "MF 100 %", "added"))
    table = MarkdownTable(("ms on the device", *header), packages=PACKAGES)
    ways = list(zip(results, ("eager", "compile"), strict=True))
    found = [[_profiled(result, f"{name}, {backend}") for name in STEPS] for result, backend in ways]
    for shown, kind in KINDS.items():
        table.add(shown, *_cells(found, lambda one, kind=kind: one["groups"][kind]), of=results)
    table.add("all", *_cells(found, lambda one: one["ms"]), of=results)
    table.add("kernels launched", *_cells(found, lambda one: one["launches"], digits=0), of=results)
    return table


def _profiled(result: Result, name: str) -> Profile:
    """The profile of a row.

    Raises:
        ConfigError: if there is no such row, or it was not profiled.

    """
    found = the_row(result, name).extra.get("profile")
    if found is None:
        raise ConfigError(f"{result.name}: no profile of {name!r}; measure the case again with --section profile")
    return found


def _cells(found: list[list[Profile]], value: Callable[[Profile], float], digits: int = 2) -> list[str]:
    """Of each way flow matching's number, MeanFlow's, and their difference."""
    pairs = [[value(one) for one in pair] for pair in found]
    return [f"{number:,.{digits}f}" for flow, full in pairs for number in (flow, full, full - flow)]


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {"step-profile": profile}

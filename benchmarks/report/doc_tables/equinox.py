"""The tables of the documentation about Equinox's training steps, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.report.markdown import MarkdownTable, the_result, the_row
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.tables import number

WAYS = (
    "filter_jit", "filter_jit donated", "cached_filter_jit donated", "make_train_step", "flat list", "TrainStep",
    "TrainStep grouped",
)  # fmt: skip
SIZES = ("tiny", "base", "large")
MACHINES = {"cpu": "CPU", "cuda": "host of a GPU"}
MODES = {"sdpa": "no dropout, fused attention", "dropout": "dropout, attention written out"}

# The networks whose whole steps the page tells of.
TINY = {"model": "tiny", "precision": "fp32", "at": "2x64"}
BASE = {"model": "base", "precision": "bf16", "at": "64x512"}


def dispatch(folder: Folder) -> MarkdownTable:
    """Host time of a call, on both machines."""
    found = _both(folder, "host")
    table = MarkdownTable(("way", *(f"ms, {machine}" for machine in MACHINES.values())))
    for name in WAYS:
        table.add(name, *(number(the_row(result, name).median, 3) for result in found), of=found)
    return table


def host(device: str, folder: Folder) -> MarkdownTable:
    """Host time of a call by every way, on one machine."""
    result = _one(folder, "host", device)
    table = MarkdownTable(("way", "ms", "p10-p90", "x flat list", "until it came back"))
    for row in (row for row in result.rows if "over_flat" in row.extra):
        ratio = f"{row.extra['over_flat']['ratio']:.2f}"
        times = (f"{row.median:.3f}", f"{row.p10:.3f}-{row.p90:.3f}", ratio, f"{row.extra['host']['median_ms']:.2f}")
        table.add(row.name, *times, of=result)
    return table


def parts(folder: Folder) -> MarkdownTable:
    """What happens to the trees, alone, on both machines."""
    found = _both(folder, "host")
    table = MarkdownTable(("part", *(f"ms, {machine}" for machine in MACHINES.values())))
    for name in dict.fromkeys(row.name for result in found for row in result.rows if "over_flat" not in row.extra):
        table.add(name, *(f"{the_row(result, name).median:.3f}" for result in found), of=found)
    return table


def targets(folder: Folder) -> MarkdownTable:
    """What was asked of the ways, and what came of it, on both machines."""
    found = _both(folder, "host")
    table = MarkdownTable(("median of the ratios (p10-p90)", "at most", *MACHINES.values()))
    asked = [{(t["name"], t["against"], t["limit"]): t for t in result.conditions["targets"]} for result in found]
    for name, against, limit in dict.fromkeys(key for each in asked for key in each):
        cells = (_judged(each[name, against, limit]) for each in asked)
        table.add(f"{name} / {against}", f"{limit:g}", *cells, of=found)
    return table


def _judged(target: Mapping[str, Any]) -> str:
    missed = "" if target["passed"] else ", **missed**"
    return f"{target['ratio']:.3f} ({target['p10']:.3f}-{target['p90']:.3f}){missed}"


def leaves(device: str, folder: Folder) -> MarkdownTable:
    """Host time by the number of arrays, on one machine."""
    result = _one(folder, "leaves", device)
    arrays = [the_row(result, f"flat list, {size}").extra["arrays"] for size in SIZES]
    header = (f"{size}, {count:,}" for size, count in zip(SIZES, arrays, strict=True))
    table = MarkdownTable(("ms, by arrays", *header))
    for way in dict.fromkeys(row.name.rpartition(", ")[0] for row in result.rows):
        table.add(way, *(f"{the_row(result, f'{way}, {size}').median:.3f}" for size in SIZES), of=result)
    return table


def cpu_steps(folder: Folder) -> MarkdownTable:
    """Whole steps on a CPU: processor time over the bare executable's."""
    result = the_result(folder, "train-step", section="step", **TINY, mode=None, device="cpu")
    table = MarkdownTable(("way", *MODES.values()))
    for way in _ways(result):
        rows = (the_row(result, f"{way}, {mode}") for mode in MODES)
        table.add(way, *(_over(row, "cpu_over_bare") for row in rows), of=result)
    return table


def gpu_steps(mode: str, folder: Folder) -> MarkdownTable:
    """Whole steps on a GPU: waited for, and in a loop that waits at its end."""
    result = the_result(folder, "train-step", section="step", **BASE, mode=mode, device="cuda")
    table = MarkdownTable(("way", "waited, ms", "x bare", "in a loop, ms", "x bare", "first call, s"))
    for way in _ways(result):
        row = the_row(result, f"{way}, {mode}")
        free, first = row.extra["free"], f"{row.extra['free']['first_ms'] / 1e3:.1f}"
        waited, looped = (_over(row, key) for key in ("over_bare", "free_over_bare"))
        table.add(way, f"{row.median:.2f}", waited, f"{free['median_ms']:.2f}", looped, first, of=result)
    return table


def _ways(result: Result) -> list[str]:
    return list(dict.fromkeys(row.name.rpartition(", ")[0] for row in result.rows))


def _over(row: Measurement, key: str) -> str:
    """A ratio to the bare executable with its 95 % interval, which that itself has not."""
    found = row.extra[key]
    low, high = found["interval"]
    return "1" if low == high else f"{found['ratio']:.3f} ({low:.3f}-{high:.3f})"


def _one(folder: Folder, section: str, device: str) -> Result:
    return the_result(folder, "train-step", section=section, model="base", device=device)


def _both(folder: Folder, section: str) -> list[Result]:
    return [_one(folder, section, device) for device in MACHINES]


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "dispatch": dispatch,
    "host-cpu": partial(host, "cpu"),
    "host-gpu": partial(host, "cuda"),
    "tree-parts": parts,
    "dispatch-targets": targets,
    "leaves-cpu": partial(leaves, "cpu"),
    "leaves-gpu": partial(leaves, "cuda"),
    "steps-cpu": cpu_steps,
    "steps-gpu": partial(gpu_steps, "sdpa"),
    "steps-gpu-dropout": partial(gpu_steps, "dropout"),
}

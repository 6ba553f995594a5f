"""The tables of the documentation about training steps in PyTorch, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.report.markdown import MarkdownTable, a_record, the_file, the_result, the_row
from benchmarks.report.reading import Folder, Measurement, Result, Source
from benchmarks.report.tables import gib, number
from fullstride.errors import ConfigError

PACKAGES = ("torch",)
BOTH = "compile+graph"
STEP = {"model": "unet", "precision": "bf16", "batch_size": 64, "memory_order": "channels_last"}
DIT = STEP | {"model": "dit_b2", "memory_order": None}
LARGE = {"batch_size": 256, "at": "batch-256"}
COMPILED = STEP | {"backend": f"compile,{BOTH}"}
RECORDED = STEP | {"backend": "eager,graph", "section": "alternatives"}
BATCHES = STEP | {"backend": BOTH, "section": "batches"}
NETWORKS = {
    "U-Net 52M, 64 (`--channels-last`)": COMPILED,
    "the same in TF32": STEP | {"precision": "tf32"},
    "the same in fp32 (IEEE)": STEP | {"precision": "fp32"},
    "DiT-B/2, 64": DIT,
    "DiT-B/2, 256": DIT | LARGE,
    "DiT-B/4, 64": DIT | {"model": "dit_b4"},
    "DiT-B/4, 256": DIT | {"model": "dit_b4"} | LARGE,
}
# What a table calls a row of the bench.
ALTERNATIVES = {
    "flow matching": "FM MSE",
    "**MeanFlow 100 %**": "MeanFlow 100%",
    "`torch.func.jvp` of plain operations": "torch.func.jvp of plain operations",
    "A: the network compiled, `torch.func.jvp` around it": "A: the network compiled, torch.func.jvp around it",
    "A2: the loss compiled with `reduce-overhead`": "A2: the loss compiled with reduce-overhead",
    "B: the JVP by two VJPs": "B: the JVP by two VJPs",
    "D: split JVP": "D: split JVP",
    "D: micro-batched JVP, 16 at once": "D: micro-batched JVP, 16 at once",
    "E: the whole batch in the JVP, ratio 25 %": "E: the whole batch in the JVP, ratio 25%",
    "MeanFlow 25 %, one pass": "MeanFlow 25%",
    "MeanFlow 25 %, two passes": "MeanFlow 25%, two passes",
    "MeanFlow 75 %, one pass": "MeanFlow 75%",
    "MeanFlow 75 %, two passes": "MeanFlow 75%, two passes",
    "F: the JVP alone": "F: the JVP alone",
    "G: `make_graphed_callables`": "G: make_graphed_callables",
    "H: captured JVP, eager prediction": "H: captured JVP, eager prediction",
    "H: `jvp_backend=two_pass`": "H: two_pass",
    "H: the same, its JVP in TF32": "H: two_pass, its JVP in tf32",
    "I: `jvp_backend=forward_ad`": "I: forward_ad",
    "finite difference": "finite difference",
}
CHANGED = {"model": "unet", "batch": 64, "precision": "bf16", "backend": BOTH, "full_step": False}
# What was changed, what had been predicted of it, and the settings that the file has it under.
CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "none: row-major, the library's GroupNorm where there is no tangent",
        "",
        {"code": 1, "channels_last": False, "norm": "auto"},
    ),
    (
        "`channels_last=true`",
        "faster: no copies of images around norms",
        {"code": 1, "channels_last": True, "norm": "auto"},
    ),
    (
        "fused GroupNorm, SiLU included, without a tangent too",
        "may be faster",
        {"code": 1, "channels_last": True, "norm": "triton"},
    ),
    ("a tangent through each product once", "MF 17.4", {"code": 2}),
    (
        "attention reads pixels in the image's order; upsampling repeats",
        "FM 12.7: copies and scatters by the profile",
        {"code": 3, "cudnn_search": False},
    ),
    ("cuDNN searches its algorithms", "unknown", {"code": 3, "cudnn_search": True}),
)


def networks(folder: Folder) -> MarkdownTable:
    """A step of each network by share of the samples in the JVP."""
    shares = ("MF 25 %", "50 %", "75 %", "100 %")
    header = ("network, batch, bf16 unless named", "bound of FM", "FM", *shares, "100 % / FM", "memory")
    table = MarkdownTable(header, packages=PACKAGES)
    for shown, conditions in NETWORKS.items():
        result = steps_on_gpu(folder, conditions)
        flow, full = (the_row(result, f"{name}, {BOTH}") for name in ("FM MSE", "MeanFlow 100%"))
        some = (_first(result, f"MeanFlow {share}%", BOTH) for share in (25, 50, 75))
        times = (f"{row.median:.2f}" if row else "" for row in (flow, *some, full))
        memory = f"{full.extra['memory_over_flow_matching']:.2f} x"
        table.add(shown, f"{flow.floor:.1f}", *times, f"{full.median / flow.median:.2f}", memory, of=result)
    return table


def batches(folder: Folder) -> MarkdownTable:
    """A step by the batch, a column each."""
    result = steps_on_gpu(folder, BATCHES)
    sizes = list(dict.fromkeys(row.extra["batch"] for row in result.rows))
    flow, full = (
        [the_row(result, f"{name}, {BOTH}", batch=size) for size in sizes] for name in ("FM MSE", "MeanFlow 100%")
    )
    table = MarkdownTable(("batch", *map(str, sizes)), packages=PACKAGES)
    ratios = (slow.median / fast.median for slow, fast in zip(full, flow, strict=True))
    memory = _range(row.extra["memory_over_flow_matching"] for row in full)
    table.add("FM, ms", *(f"{row.median:.2f}" for row in flow), of=result)
    table.add("MF 100 %, ms", *(f"{row.median:.2f}" for row in full), of=result)
    table.add("MF 100 % / FM", *(f"{ratio:.2f}" for ratio in ratios), of=result)
    table.add("FM, ms an image", *(f"{row.extra['ms_per_sample']:.3f}" for row in flow), of=result)
    table.add("FM over its bound", *(f"{row.over_floor:.1f}" for row in flow), of=result)
    table.add(f"MF 100 %, GiB ({memory} x FM's)", *(gib(row.peak_bytes) for row in full), of=result)
    return table


def _range(values: Iterable[float]) -> str:
    """One number where all are the same when rounded, or the least and the largest."""
    ordered = sorted(values)
    low, high = (f"{value:.2f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low}-{high}"


def alternatives(folder: Folder) -> MarkdownTable:
    """Other ways to make the step, recorded as written, and compiled and recorded."""
    both = (steps_on_gpu(folder, RECORDED), steps_on_gpu(folder, COMPILED))
    table = MarkdownTable(("", "recorded", "x FM", "compiled, recorded", "x FM", "memory"), packages=PACKAGES)
    for shown, name in ALTERNATIVES.items():
        recorded, compiled = _first(both[0], name, "graph", "eager"), _first(both[1], name, BOTH, "compile")
        refused = _refused(both[0], name)
        if not (recorded or compiled or refused):
            raise ConfigError(f"{both[0].name}, {both[1].name}: no row {name!r}; measure the case again")
        cells = (*_timed(recorded, refused), *_timed(compiled))
        table.add(shown, *cells, _memory(compiled) or _memory(recorded), of=both)
    return table


def _refused(result: Result, name: str) -> str:
    """The error of what did not run; nothing where it was not tried."""
    found = (one["why"] for one in result.conditions["left_out"] if one["name"] == name)
    return next(found, "").partition(":")[0]


def _timed(row: Measurement | None, refused: str = "") -> tuple[str, str]:
    """Milliseconds, marked where the step is not recorded, and x flow matching of what is a whole step."""
    if row is None:
        return refused, ""
    mark = "" if row.extra["backend"].endswith("graph") else " *"
    return f"{row.median:.2f}{mark}", number(row.extra["over_flow_matching"], 3) if "ratio" in row.extra else ""


def _memory(row: Measurement | None) -> str:
    found = row.extra.get("memory_over_flow_matching") if row and "ratio" in row.extra else None
    return "" if found is None else f"{found:.2f}"


def steps_on_gpu(folder: Folder, conditions: Mapping[str, Any]) -> Result:
    """The newest result of `python -m benchmarks meanflow-step` on a GPU under these conditions.

    Raises:
        ConfigError: if there is none.

    """
    return the_result(folder, "meanflow-step", device="cuda", **conditions)


def _first(result: Result, name: str, *backends: str) -> Measurement | None:
    """The row of the first of these backends that has one."""
    rows = {row.name: row for row in reversed(result.rows)}  # the first of a name stays
    return next((rows[full] for backend in backends if (full := f"{name}, {backend}") in rows), None)


def changes(folder: Folder) -> MarkdownTable:
    """What was changed on the way to the fastest step, beside what had been predicted."""
    source = the_file(folder, "meanflow-step-changes")
    table = MarkdownTable(("change", "predicted", "FM", "MF", "MF / FM"), text=2, packages=PACKAGES)
    for what, predicted, settings in CHANGES:
        flow, full = (_changed(source, ratio=ratio, **settings) for ratio in (0.0, 1.0))
        if flow is None:
            raise ConfigError(f"{source.name}: no row of flow matching with {settings}; take the table's row out")
        slower = ("", "") if full is None else (f"{full:.2f}", f"{full / flow:.2f}")
        table.add(what, predicted, f"{flow:.2f}", *slower, of=source)
    return table


def _changed(source: Source, **settings: Any) -> float | None:
    found = a_record(source.data["rows"], **CHANGED | settings)
    return None if found is None else found["median_ms"]


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "step-changes": changes,
    "step-networks": networks,
    "step-batches": batches,
    "step-alternatives": alternatives,
}

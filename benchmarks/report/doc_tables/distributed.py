"""The tables of the documentation about several GPUs, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping

from benchmarks.report.markdown import MarkdownTable, the_file, the_result, the_row
from benchmarks.report.reading import Folder, Measurement
from benchmarks.report.tables import beside, gib, number
from fullstride.errors import ConfigError

PACKAGES = ("torch",)
MODELS = {"unet": "U-Net", "dit_b2": "DiT-B/2"}
# What a table calls a row of the file.
WAYS = {
    "NCCL": "nccl",
    "NCCL with at most 8 blocks": "nccl 8 CTAs",
    "NCCL with at most 2 blocks": "nccl 2 CTAs",
    "PyTorch's symmetric memory, two-shot kernel": "symm_mem two-shot",
    "**copies, recorded in a graph**": "the same in a graph",
}
# Of linear scaling, in percent.
WANTED = 95.0


def transfers(folder: Folder) -> MarkdownTable:
    """How gradients travel between two GPUs, and what the work beside them loses."""
    source = the_file(folder, "meanflow-transfers")
    loses = ("what DiT's products beside it lose, ms", "what an elementwise kernel loses, ms")
    table = MarkdownTable(("", "alone, ms", "GB/s", *loses), packages=PACKAGES)
    rows = source.data["beside"]["rows"]
    for shown, name in WAYS.items():
        if name not in rows:
            raise ConfigError(f"{source.name}: no row {name!r}; expected one of {', '.join(rows)}")
        row = rows[name]
        lost = (f"{row[work]['lost_each']:.2f}" for work in ("gemm", "elementwise"))
        table.add(shown, number(row["alone_ms"], 3), f"{row['gbs']:.0f}", *lost, of=source)
    return table


def scaling(folder: Folder) -> MarkdownTable:
    """A step of all GPUs together beside each one's own, with every sample in the JVP."""
    steps = {"model": ",".join(MODELS), "precision": "bf16", "backend": "compile+graph", "rows": "ratio-100"}
    result = the_result(folder, "meanflow-scaling", **steps, device="cuda")
    header = (cell for shown in MODELS.values() for cell in (f"{shown}, ms", "of linear", "GiB"))
    table = MarkdownTable(("", *header), packages=PACKAGES)
    alone = {model: the_row(result, f"{model}, ratio 100%, 1 process") for model in MODELS}
    table.add("each GPU alone, all at once", *(cell for row in alone.values() for cell in _cells(row)), of=result)
    count = result.conditions["processes"]
    of_count = [row for row in result.rows if row.extra["processes"] == count]
    for kind, by in dict.fromkeys((row.extra["kind"], row.extra.get("transfers")) for row in of_count):
        together = (the_row(result, f"{model}, ratio 100%, {count} processes, {kind}, {by}") for model in MODELS)
        table.add(f"`{kind}`, `{by}`", *(cell for row in together for cell in _cells(row)), of=result)
    return table


def _cells(row: Measurement) -> tuple[str, str, str]:
    """Milliseconds with their spread, percent of linear, in bold where it is what was wanted, and memory."""
    linear = "" if row.extra["processes"] == 1 else _percent(100 * row.extra["efficiency"])
    return f"{row.median:.2f} ({row.p10:.2f}-{row.p90:.2f})", linear, gib(row.peak_bytes, 1)


def _percent(linear: float) -> str:
    shown = f"{beside(linear, WANTED, 1)} %"
    return shown if linear < WANTED else f"**{shown}**"


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {"gradient-transfers": transfers, "gpus": scaling}

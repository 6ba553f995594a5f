"""What the two benches of `fullstride.jvp` share: formats, clocks, captured graphs, their table."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fullstride.bench.floor import Ceilings, floor, measure_ceilings
from fullstride.bench.gate import require_close
from fullstride.bench.results import CaseResult, Row
from fullstride.bench.timing import Call, Clock, Plan, Timing, clock_for, measure
from fullstride.precision import set_precision

FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "tf32x3": torch.float32,
}
PLAN = Plan(seconds=0.5, repeats=10, most=100)
# Against fp64 a right result may be twice as far off as eager's, or a few roundings of what is stored.
OVER_EAGER, ROUNDINGS = 2.0, 4.0


@dataclass(frozen=True)
class Setup:
    """What all rows of a bench share."""

    device: torch.device
    precision: str
    implementation: str
    clock: Clock
    ceilings: Ceilings

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors."""
        return FORMATS[self.precision]

    def randn(self, *size: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*size, device=self.device, dtype=self.dtype)

    def fits(self, size: int) -> bool:
        """Whether that many bytes can be taken: four fifths of a GPU's free memory, 2 GiB of a processor's."""
        if self.device.type != "cuda":
            return size <= 2 << 30
        torch.cuda.empty_cache()
        return size <= 0.8 * torch.cuda.mem_get_info()[0]

    def row(
        self, shape: str, kind: str, who: str, call: Call, flops: int, moved: int, errors: "Errors | None" = None
    ) -> Row:
        """Time a call, and see what it keeps alive at most; work is in operations and in bytes that must move."""
        name = f"{shape} {kind}, {who}"
        Console(stderr=True).print(f"timing: {name}")
        extra = {"shape": shape, "kind": kind, "who": who, "gflop": flops / 1e9, "bytes": moved, "errors": errors or {}}
        return Row(name, timed(call, self.clock, self.device), floor(flops, moved, self.ceilings), extra)


def make_setup(device: torch.device, precision: str, implementation: str) -> Setup:
    """The setup, with this machine's ceilings in that format.

    Raises:
        ConfigError: for a format that the device does not have.

    """
    _set(precision, device)
    torch.manual_seed(0)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")
    kind = device.type
    return Setup(device, precision, implementation, clock_for(kind), measure_ceilings(kind, dtype))


def _set(precision: str, device: torch.device) -> None:
    """The process's own treatment of fp32: eager's, and that of the ceilings."""
    set_precision("tf32" if precision == "tf32" else "fp32", device)


def without_graph(run: Callable[..., Any], *args: Any) -> Call:
    """A call that autograd does not record."""

    def call() -> Any:
        with torch.no_grad():
            return run(*args)

    return call


def timed(call: Call, clock: Clock, device: torch.device) -> Timing:
    """Times of a call, on a GPU those of its captured graph, in which no host time is; memory of a plain one."""
    first = clock.time(call)
    clock.reset_peak()
    call()
    peak = clock.peak_bytes()
    return replace(measure(captured(call, device), clock, PLAN), first_ms=first, peak_bytes=peak)


def captured(call: Call, device: torch.device) -> Call:
    """A CUDA graph of the call, as a function that replays it; elsewhere the call itself."""
    if device.type != "cuda":
        return call
    torch.cuda.empty_cache()  # the graph has a pool of its own
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def error_beside_eager(name: str, out: Tensor, exact: Tensor, eager: Tensor | None) -> dict[str, float]:
    """Relative errors against fp64, ours and eager's in the same format.

    Raises:
        GateError: if ours is more than twice eager's, and more than a few roundings.

    """
    least = ROUNDINGS * torch.finfo(out.dtype).eps
    found = {} if eager is None else {"eager": require_close(f"{name}, eager", eager, exact, 0.99)}
    return {"ours": require_close(name, out, exact, max(least, OVER_EAGER * found.get("eager", 0.0)))} | found


Errors = dict[str, dict[str, float]]  # by result, then ours and eager's


def merged(found: Errors, more: Errors) -> Errors:
    """The larger of the errors."""
    every = {name: [d.get(name, {}) for d in (found, more)] for name in found | more}
    return {
        name: {who: max(errors.get(who, 0.0) for errors in both) for who in both[0] | both[1]}
        for name, both in every.items()
    }


def by_format(setup: Setup, names: tuple[str, ...], errors_of: Callable[[Setup], Errors]) -> dict[str, Errors]:
    """The errors in each format that the device has; TF32 is CUDA's."""
    found = {}
    for name in names:
        if setup.device.type == "cuda" or not name.startswith("tf32"):
            _set(name, setup.device)
            found[name] = errors_of(replace(setup, precision=name))
    _set(setup.precision, setup.device)
    return found


def flat(errors: dict[str, Errors]) -> dict[str, float]:
    """As a gate's errors: `bf16 to, ours`."""
    return {
        f"{form} {name}, {who}": e
        for form, results in errors.items()
        for name, both in results.items()
        for who, e in both.items()
    }


def errors_table(errors: dict[str, Errors]) -> Table:
    """One line a result, ours and eager's error in each format."""
    out = Table(box=box.SIMPLE_HEAD, title="relative errors against fp64: ours (eager's)", title_justify="left")
    for column in ("", *errors):
        out.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name in next(iter(errors.values())):
        out.add_row(name, *(_pair(found[name]) for found in errors.values()))
    return out


def _pair(errors: dict[str, float]) -> str:
    return f"{errors['ours']:.1e}" + (f" ({errors['eager']:.1e})" if "eager" in errors else "")


def table(result: CaseResult, rate: str, rate_of: Callable[[Row], str]) -> Table:
    """One line a row: time, memory, work, rate, floor, errors; a column `rate` of the case's own."""
    c = result.ceilings
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if isinstance(v, str))
    out = Table(
        box=box.SIMPLE_HEAD,
        title=f"{result.case}: {conditions}",
        caption=f"ceilings: {c.flops / 1e12:.3g} TFLOP/s ({c.gemm}), {c.bytes / 1e12:.3g} TB/s copy",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("size", "pass", "by", "ms", "MB", "GFLOP", rate, "floor", "x floor", "error", "eager's"):
        out.add_column(column, justify="left" if column in ("size", "pass", "by") else "right", no_wrap=True)
    for row in result.rows:
        out.add_row(*_cells(row, rate_of(row)))
    return out


def _cells(row: Row, rate: str) -> tuple[str, ...]:
    peak, x = row.timing.peak_bytes, row.extra
    worst = [max((e[who] for e in x["errors"].values() if who in e), default=None) for who in ("ours", "eager")]
    return (
        *(x[key] for key in ("shape", "kind", "who")),
        f"{row.timing.median_ms:.4g}",
        "" if peak is None else f"{peak / 1e6:.1f}",
        f"{x['gflop']:.4g}" if x["gflop"] else "",
        rate,
        f"{row.floor.ms:.3g}",
        f"{row.over_floor:.2f}",
        *("" if e is None else f"{e:.1e}" for e in worst),
    )


WIDTH = 140  # that no line of the tables is cut short where the output is a file


def show(result: CaseResult, errors: dict[str, Errors], rate: str, rate_of: Callable[[Row], str], path: Path) -> None:
    """Print both tables."""
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table(result, rate, rate_of))
    console.print(errors_table(errors))
    console.print(f"written to {path}")

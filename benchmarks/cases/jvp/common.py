"""Shared parts of the two benchmarks of `fullstride.jvp`: formats, rows, errors against fp64 next to eager's."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, finfo

from benchmarks.cases.jvp.timing import Copies, timed
from benchmarks.harness.budget import NO_MEMORY, NO_TIME, Budget, reason, say
from benchmarks.harness.results import Row
from fullstride.device.precision import set_precision
from fullstride.errors import one_of
from fullstride.measure.gate import require_close
from fullstride.measure.roofline import Ceilings, RooflineBound, measure_ceilings, roofline_bound
from fullstride.measure.timing import Call, Clock, clock_for

# Against fp64 a right result may be twice as far off as eager's, or a few roundings of what is stored.
OVER_EAGER, ROUNDINGS = 2.0, 4.0
Errors = dict[str, dict[str, float]]  # by result, then ours and eager's
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "tf32x3": torch.float32,
}


def error_beside_eager(
    name: str, out: Tensor, exact: Tensor, eager: Tensor | None, rounding: float | None = None
) -> dict[str, float]:
    """Return relative errors against fp64, of ours and of eager in the same format.

    `rounding` is relative; None means that of the format of `out`. GateError if our error is more than twice
    eager's, and more than a few roundings.
    """
    least = ROUNDINGS * (rounding or finfo(out.dtype).eps)
    found = {} if eager is None else {"eager": require_close(f"{name}, eager", eager, exact, 0.99)}
    return {"ours": require_close(name, out, exact, max(least, OVER_EAGER * found.get("eager", 0.0)))} | found


def merged(found: Errors, more: Errors) -> Errors:
    """Return the larger error of each pair."""
    every = {name: [d.get(name, {}) for d in (found, more)] for name in found | more}
    return {
        name: {who: max(errors.get(who, 0.0) for errors in both) for who in both[0] | both[1]}
        for name, both in every.items()
    }


@dataclass(frozen=True)
class OpWork:
    """Work that one row of a table measures."""

    shape: str
    kind: str  # its pass
    who: str  # by what
    flops: int  # operations, 2 a multiply-add
    moved: int  # bytes that must be read or written once
    given: int  # bytes of the tensors that are there before
    held: int  # bytes of all tensors that are there at its end, with which its memory is compared
    needs: int = 0  # bytes of memory that it is known to take, for a processor, which would swap
    errors: Errors = field(default_factory=dict)  # of its results against fp64


@dataclass(frozen=True)
class LeftOut:
    """A row that was not measured, and why: `no memory`, `no time`, or what went wrong."""

    shape: str
    kind: str
    who: str
    why: str


Entry = Row | LeftOut


def broken(shape: str, kind: str, who: str, error: Exception) -> LeftOut:
    """Return a row left out because of an error, with the place of the error if it is ours."""
    why = reason(error)
    if who == "ours" and why != NO_MEMORY:
        say("".join(traceback.format_exception(error)))
    return LeftOut(shape, kind, who, why)


@dataclass(frozen=True)
class OpSetup:
    """Settings that all rows of a benchmark share."""

    device: torch.device
    precision: str
    implementation: str
    clock: Clock
    ceilings: Ceilings
    budget: Budget

    @cached_property
    def copies(self) -> Copies:
        """Times of copies, with which norms are compared."""
        return Copies(self.clock, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensors."""
        return FORMATS[self.precision]

    def randn(self, *size: int) -> Tensor:
        """Draw a normally distributed tensor."""
        return torch.randn(*size, device=self.device, dtype=self.dtype)

    def fits(self, size: int) -> bool:
        """Return whether `size` bytes can be allocated: four fifths of the GPU's free memory, or 2 GiB on a CPU."""
        if self.device.type != "cuda":
            return size <= 2 << 30
        torch.cuda.empty_cache()
        return size <= 0.8 * torch.cuda.mem_get_info()[0]

    def row(
        self, work: OpWork, make: Callable[[int], Call], sets: int = 1, least: RooflineBound | None = None
    ) -> Entry:
        """Time a pass and measure its memory with all that leads to it; or return why that is impossible.

        `make` prepares a call on the i-th of `sets` sets of inputs, and runs the forward pass of a backward
        pass.
        """
        if self.budget.spent:
            return LeftOut(work.shape, work.kind, work.who, NO_TIME)
        if self.device.type != "cuda" and not self.fits(work.needs):
            return LeftOut(work.shape, work.kind, work.who, NO_MEMORY)
        try:
            return self._row(work, make, sets, least or roofline_bound(work.flops, work.moved, self.ceilings))
        except Exception as error:  # what one refuses or breaks at is no reason to lose the rest
            return broken(work.shape, work.kind, work.who, error)

    def _row(self, work: OpWork, make: Callable[[int], Call], sets: int, least: RooflineBound) -> Row:
        say(f"timing: {work.shape} {work.kind}, {work.who}")
        first = self.clock.time(lambda: make(0)())
        # What dies while the call runs hides as much of it: autograd's threads let go when they come to it.
        peak = max(self._added(make) for _ in range(3)) if self.device.type == "cuda" else None
        timing, graphed = timed([make(i) for i in range(sets)], self.clock, self.device, least.ms)
        timing = replace(timing, first_ms=first, peak_bytes=None if peak is None else peak + work.given)
        extra = {"shape": work.shape, "kind": work.kind, "who": work.who, "gflop": work.flops / 1e9}
        extra |= {"bytes": work.moved, "tensor_bytes": work.held, "calls_in_graph": graphed, "errors": work.errors}
        return Row(f"{work.shape} {work.kind}, {work.who}", timing, least, extra)

    def _added(self, make: Callable[[int], Call]) -> int:
        """Return the peak of the bytes that preparing and making a call add."""
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        self.clock.reset_peak()
        make(0)()
        return (self.clock.peak_bytes() or 0) - before


def make_setup(device: torch.device, precision: str, implementation: str, seconds: float) -> OpSetup:
    """The setup, with this machine's ceilings in that format; ConfigError for a format that the device does not have,
    or a device without fp64.
    """
    one_of("--device", device.type, ("cpu", "cuda"))
    _set(precision, device)
    torch.manual_seed(0)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")
    kind, budget = device.type, Budget.of(seconds)
    return OpSetup(device, precision, implementation, clock_for(kind), measure_ceilings(kind, dtype), budget)


def set_format(setup: OpSetup) -> None:
    """Set how the process computes fp32 products, which eager follows."""
    _set(setup.precision, setup.device)


def _set(precision: str, device: torch.device) -> None:
    set_precision("tf32" if precision == "tf32" else "fp32", device)


def without_graph(run: Callable[..., Any], *args: Any) -> Call:
    """Return a call that autograd does not record."""

    def call() -> Any:
        with torch.no_grad():
            return run(*args)

    return call


def by_format(
    setup: OpSetup, names: tuple[str, ...], errors_of: Callable[[OpSetup], Errors]
) -> tuple[dict[str, Errors], list[Entry]]:
    """Return the errors in each format that the device supports, and the formats left out; TF32 needs CUDA."""
    found, left_out = {}, list[Entry]()
    for name in names:
        if setup.device.type != "cuda" and name.startswith("tf32"):
            continue
        if setup.budget.spent:
            left_out.append(LeftOut("errors", name, "ours", NO_TIME))
            continue
        say(f"errors: {name} against fp64")
        set_format(one := replace(setup, precision=name))
        try:
            found[name] = errors_of(one)
        except Exception as error:
            left_out.append(broken("errors", name, "ours", error))
    set_format(setup)
    return found, left_out


def wrong_of(entries: list[Entry]) -> list[str]:
    """Return our passes that are missing for another reason than memory or time, with the reason."""
    mine = [e for e in entries if isinstance(e, LeftOut) and e.who == "ours" and e.why not in (NO_MEMORY, NO_TIME)]
    return [f"{e.shape} {e.kind}: {e.why}" for e in mine]

"""`python -m benchmarks jvp-host`: what one call of an op takes of the host, forward and backward, under `jvp` or not.

Tensors are so small that the device waits for the host. A chain of calls of one op is timed as a whole: in PyTorch,
under `torch.func.jvp` and under `fullstride.jvp.jvp` with a detached tangent, each eager and compiled. The time of one
call is that of the chain by its number of calls. The bound is what the device needs for the bytes, which says how much
of the time is the host's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.jvp.common import FORMATS, LeftOut, broken
from benchmarks.cases.jvp.options import HostOptions
from benchmarks.harness.budget import NO_TIME, Budget, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish
from fullstride.device.select import resolve_device
from fullstride.jvp import jvp
from fullstride.measure.gate import require_close
from fullstride.measure.roofline import measure_ceilings, roofline_bound
from fullstride.measure.timing import TimingPlan, clock_for, measure

CALLS = 16  # of an op in a chain
Chain = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Op:
    """An op: the shapes of its input and its parameters, and the call, whose output has the input's shape."""

    shape: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor]


OPS = {
    "group_norm": Op((2, 32, 4, 4), ((32,), (32,)), lambda x, w, b: F.group_norm(x, 8, w, b)),
    "layer_norm": Op((2, 16, 32), ((32,), (32,)), lambda x, w, b: F.layer_norm(x, (32,), w, b)),
    "rms_norm": Op((2, 16, 32), ((32,),), lambda x, w: F.rms_norm(x, (32,), w)),
    "attention": Op((1, 2, 16, 32), (), lambda x: F.scaled_dot_product_attention(x, x, x)),
    "linear": Op((2, 16, 32), ((32, 32), (32,)), F.linear),
    "conv2d": Op((2, 8, 8, 8), ((8, 8, 3, 3), (8,)), lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    "silu": Op((2, 16, 32), (), F.silu),
    "gelu": Op((2, 16, 32), (), F.gelu),
    "add": Op((2, 16, 32), ((32,),), torch.add),
    "mul": Op((2, 16, 32), ((32,),), torch.mul),
}
Pass = Callable[[Chain, Tensor, Tensor], tuple[Tensor, Tensor | None]]  # of a chain, its input and the tangent
PASSES: dict[str, Pass] = {
    "torch": lambda chain, x, t: (chain(x), None),
    "torch.func.jvp": lambda chain, x, t: torch.func.jvp(chain, (x,), (t,))[:2],
    "jvp": lambda chain, x, t: jvp(chain, (x,), (t,))[:2],
}


@dataclass(frozen=True)
class Problem:
    """A chain of calls of an op, its input, the tangent, and the output's gradient."""

    op: Op
    x: Tensor
    t: Tensor
    parameters: list[Tensor]

    @classmethod
    def draw(cls, op: Op, device: torch.device, dtype: torch.dtype) -> "Problem":
        """Draw normally distributed numbers."""
        draw = lambda shape: torch.randn(shape, device=device, dtype=dtype)  # noqa: E731
        parameters = [(draw(shape) / shape[-1] ** 0.5).requires_grad_() for shape in op.parameters]
        return cls(op, draw(op.shape).requires_grad_(), draw(op.shape), parameters)

    def double(self) -> "Problem":
        """Return the problem in fp64."""
        x, t, *parameters = (a.detach().double() for a in (self.x, self.t, *self.parameters))
        return Problem(self.op, x, t, parameters)

    def chain(self, x: Tensor) -> Tensor:
        """Call the op again and again."""
        for _ in range(CALLS):
            x = self.op.call(x, *self.parameters)
        return x

    @property
    def bytes(self) -> int:
        """Bytes that forward and backward pass of the chain with a derivative read and write at least."""
        return CALLS * 7 * self.x.nbytes

    def step(self, run: Pass, compiled: bool) -> Callable[[], Tensor]:
        """Return a forward and a backward pass."""
        forward = torch.compile(run, fullgraph=True, dynamic=False) if compiled else run
        gradient = torch.ones_like(self.x)

        def step() -> Tensor:
            out, _ = forward(self.chain, self.x, self.t)
            return torch.autograd.grad(out, [self.x, *self.parameters], gradient)[0]

        return step

    def error(self, run: Pass) -> float:
        """Compare output and tangent of one call with those of fp64, as far as the format goes."""
        exact = self.double()
        call = lambda p: lambda x: p.op.call(x, *p.parameters)  # noqa: E731
        found = run(call(self), self.x, self.t)
        with sdpa_kernel(SDPBackend.MATH):
            right = torch.func.jvp(call(exact), (exact.x,), (exact.t,))
        pairs = [(a, b) for a, b in zip(found, right, strict=False) if a is not None]
        return max(require_close("a call", a, b, 16 * torch.finfo(a.dtype).eps) for a, b in pairs)


def run(options: HostOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    GateError if `jvp` is wrong; ConfigError for an op that there is not.
    """
    device, dtype = resolve_device(options.device), FORMATS[options.precision]
    torch.manual_seed(0)
    clock, budget = clock_for(device.type), Budget.of(options.seconds)
    ceilings = measure_ceilings(device.type, str(dtype).removeprefix("torch."))
    entries, gate, plan = list[Row | LeftOut](), {}, TimingPlan(warmup=3, repeats=20, seconds=0.5)
    for name in options.only or OPS:
        problem = Problem.draw(OPS[name], device, dtype)
        gate[name] = problem.error(PASSES["jvp"])
        for who, way, compiled in _ways(options.compiled):
            if budget.spent:
                entries.append(LeftOut(name, way, who, NO_TIME))
                continue
            say(f"timing: {name}, {who}, {way}")
            torch._dynamo.reset()
            try:
                timing = measure(problem.step(PASSES[who], compiled), clock, plan)
            except Exception as error:  # torch.func.jvp of a fused attention, say
                entries.append(broken(name, way, who, error))
                continue
            extra = {"op": name, "who": who, "way": way, "call_us": timing.median_ms / CALLS * 1e3}
            entries.append(Row(f"{name}, {who}, {way}", timing, roofline_bound(0, problem.bytes, ceilings), extra))
    rows = [entry for entry in entries if isinstance(entry, Row)]
    left_out = [vars(entry) for entry in entries if isinstance(entry, LeftOut)]
    conditions: dict[str, Any] = {"precision": options.precision, "calls": CALLS, "left_out": left_out}
    conditions |= at(only=(options.only, ()), compiled=(options.compiled, True))
    result = CaseResult("jvp-host", device.type, conditions, gate, ceilings, rows, environment())
    wrong = [f"{e['shape']}, {e['kind']}: {e['why']}" for e in left_out if e["who"] == "jvp" and e["why"] != NO_TIME]
    return finish(result, out, lambda: [table(rows)], width=0, wrong=wrong)


def _ways(compiled: bool) -> Iterator[tuple[str, str, bool]]:
    for way in (False, True)[: 1 + compiled]:
        for who in PASSES:
            yield who, "compiled" if way else "eager", way


def table(rows: list[Row]) -> Table:
    """Return a table of microseconds a call."""
    columns = list(dict.fromkeys((row.extra["who"], row.extra["way"]) for row in rows))
    shown = Table("us a call, forward and backward", *(", ".join(column) for column in columns))
    found = {(row.extra["op"], row.extra["who"], row.extra["way"]): f"{row.extra['call_us']:.0f}" for row in rows}
    for op in dict.fromkeys(row.extra["op"] for row in rows):
        shown.add_row(op, *(found.get((op, *column), "") for column in columns))
    return shown

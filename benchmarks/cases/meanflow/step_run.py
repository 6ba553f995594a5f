"""Run of a case of the step benchmark: check, then each backend, eager or captured, timed with its memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from benchmarks.cases.meanflow.step_cases import Pass, Passes, StepCase, Steps
from benchmarks.cases.meanflow.step_gate import TOLERANCE, Exact, Passed
from benchmarks.cases.meanflow.step_profile import profiled
from benchmarks.cases.meanflow.step_setup import StepSetup
from benchmarks.harness.budget import NO_MEMORY, NO_TIME, reason, say
from benchmarks.harness.results import Row
from fullstride.device import memory
from fullstride.device.cuda_graph import CudaGraph
from fullstride.measure.gate import require_close
from fullstride.measure.timing import Call, measure
from fullstride.step.torch.runners.graph import WARM


@dataclass(frozen=True)
class LeftOut:
    """Row that was not measured, with the reason."""

    name: str
    backend: str
    batch: int
    why: str
    ours: bool

    @property
    def wrong(self) -> bool:
        """Return whether the row is missing because of a fault of this project."""
        return self.ours and self.why not in (NO_MEMORY, NO_TIME)


@dataclass
class StepBench:
    """Measurement of cases, with the rows found so far."""

    setup: StepSetup
    exact: Exact
    profiled: tuple[str, ...] = ()  # names of cases whose kernels are listed, too
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    turn: Callable[[], None] | None = None  # called once, before the first timing: returns when nothing else runs

    def run(self, case: StepCase | Pass, backends: tuple[str, ...]) -> None:
        """Measure a case with each of those backends that support it and are not done yet."""
        size = case.batch or self.setup.options.batch_size
        done = {(r.extra["name"], r.extra["backend"], r.extra["batch"]) for r in self.rows}
        done |= {(e.name, e.backend, e.batch) for e in self.left_out}
        wanted = [b for b in backends if b in (case.backends or backends) and (case.name, b, size) not in done]
        if not wanted:
            return
        passed: dict[bool, Passed | Exception] = {}
        started: Steps | Passes | None = None
        for backend in wanted:
            if self.setup.budget.spent:
                self.left_out.append(LeftOut(case.name, backend, size, NO_TIME, case.ours))
                continue
            try:
                started = started or case.start(self.setup, self.exact, size)
                self.rows.append(self._row(case, started, backend, size, passed))
            except Exception as error:  # what one breaks at is no reason to lose the rest
                self.left_out.append(LeftOut(case.name, backend, size, reason(error), case.ours))
                say(f"left out: {case.name}, {backend}: {self.left_out[-1].why}")
                leave_forward_ad()
            if started is not None:
                started.end()
            if self.setup.device.type == "cuda":
                memory.release(self.setup.device)
        if any("compile" in backend for backend in wanted):
            torch._dynamo.reset()

    def _row(self, case: StepCase | Pass, started: Any, backend: str, size: int, passed: dict) -> Row:
        setup = self.setup
        run_by = "" if case.own else backend
        gate = self._gated(case, started, "compile" in run_by, passed)
        if self.turn is not None:
            self.turn()
            self.turn = None
        say(f"timing: {case.name}, batch {size}, {backend}")
        started.end()
        before = torch.cuda.memory_allocated(setup.device) if setup.device.type == "cuda" else 0
        start = time.perf_counter()
        call, peak = self._made(started, run_by)
        start_ms = 1e3 * (time.perf_counter() - start)
        ms = setup.clock.time(call)
        timing = measure(call, setup.clock, setup.plan(ms))
        peak = timing.peak_bytes if peak is None else peak
        if peak is not None:
            # The memory of a case's own CUDA graph cannot be measured.
            peak = None if case.own and "graph" in backend else peak - before + setup.weight_bytes
        timing = replace(timing, first_ms=gate.first_ms + start_ms, peak_bytes=peak)
        extra = {"name": case.name, "backend": backend, "batch": size, "forwards": case.work, "errors": gate.errors}
        extra |= {"ratio": case.loss.ratio} if isinstance(case, StepCase) else {}
        if case.name in self.profiled and "graph" not in backend:
            extra["profile"] = profiled(call, setup.device)
        return Row(f"{case.name}, {backend}", timing, setup.floor(case.work, case.passes(setup), size), extra)

    def _gated(self, case: StepCase | Pass, started: Any, compiling: bool, passed: dict) -> Passed:
        """Run the gate of a case once and return its outcome; a failure is raised again instead of being retried."""
        if compiling not in passed:
            say(f"gate: {case.name}{', compiled' if compiling else ''}, against fp64")
            try:
                passed[compiling] = started.gate(compiling)
            except Exception as error:
                passed[compiling] = error.with_traceback(None)  # whose frames hold the activations
        if isinstance(found := passed[compiling], Exception):
            raise found
        return found

    def _made(self, started: Any, backend: str) -> tuple[Call, int | None]:
        """Return a prepared call, and the memory of its CUDA graph, which the measurement cannot see."""
        compiling, graph = "compile" in backend, "graph" in backend
        plain = call = started.call(compiling)
        whole = self.setup.options.full_step and isinstance(started, Steps)
        if whole:
            call = started.whole(compiling, graph)
        if not graph:
            return call, None
        for _ in range(WARM):
            call()
        memory.release(self.setup.device)
        if whole:
            call()  # which records
        else:
            call = CudaGraph(call, self.setup.generator).replay
        peak = self.setup.clock.peak_bytes()
        self._require_replays(started, plain, call)
        return call, peak

    def _require_replays(self, started: Any, plain: Call, replay: Call) -> None:
        """Check that a replay gives the captured result on the same random numbers; GateError if not."""
        setup, tolerance = self.setup, TOLERANCE[self.setup.precision]
        kept = [p.grad for p in setup.model.parameters()]
        state = setup.generator.get_state()
        with torch.random.fork_rng([setup.device] if setup.device.type == "cuda" else []):
            right = [x.detach().clone() for x in started.results(plain())]
        setup.generator.set_state(state)
        for p, gradient in zip(setup.model.parameters(), kept, strict=True):
            p.grad = gradient  # the record's, which a replay fills
        found = started.results(replay())
        a, b = (torch.cat([x.flatten().float() for x in every]) for every in (found, right))
        require_close("replay", a, b, tolerance)


def leave_forward_ad() -> None:
    """Leave the forward-mode level that an error may have left open, as later derivatives would be wrong."""
    while forward_ad._current_level >= 0:
        forward_ad.exit_dual_level()

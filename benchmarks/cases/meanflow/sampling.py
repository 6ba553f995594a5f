"""`python -m benchmarks meanflow-sampling`: cost of images by sampler, batch size and way to run the network.

A row is one batch, from noise on the device to images on the device, or a set of images from (seed, index) to the host,
as `meanflow sample` makes it. The roofline bound is the arithmetic of the network's evaluations, or reading its weights
for each of them. The network has random weights; the content of images does not change their cost.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.cases.meanflow.options import SAMPLED_BY, SamplingOptions, StepOptions
from benchmarks.cases.meanflow.step_gate import TOLERANCE
from benchmarks.cases.meanflow.step_setup import StepSetup, make_setup
from benchmarks.harness.budget import NO_MEMORY, NO_TIME, reason, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.device import memory
from fullstride.device.precision import matmul_precision
from fullstride.device.select import resolve_device
from fullstride.meanflow.objective.derivative import Velocity
from fullstride.meanflow.sampling.graphed import WARM, GraphedNetwork, check_backend
from fullstride.meanflow.sampling.samplers import SAMPLERS, meanflow_sample, sample
from fullstride.measure.gate import require_close
from fullstride.measure.timing import Call, measure

BATCHES = {"cuda": (1, 8, 64, 512), "cpu": (1, 16), "mps": (1, 16)}
STEPS: tuple[tuple[str, int], ...] = (("meanflow", 1), ("meanflow", 2), ("euler", 10))
SET = 8  # batches
JUDGED = 8  # images of a batch that are held against fp64


@dataclass(frozen=True)
class SamplingCase:
    """Sampler with one network evaluation per step that makes `num` images in batches of a size."""

    sampler: str
    steps: int
    batch: int
    num: int
    call: Call

    def name(self, backend: str) -> str:
        """Return the name of the row, which marks a set of images as one."""
        what = "" if self.num == self.batch else f", a set of {self.num} images"
        return f"{self.sampler} {self.steps}, batch {self.batch}{what}, {backend}"


@dataclass
class SamplingBench:
    """Measurement of the cases, with the rows found so far."""

    setup: StepSetup
    options: SamplingOptions
    rows: list[Row] = field(default_factory=list)  # of all cases so far
    errors: dict[str, float] = field(default_factory=dict)  # against fp64, by batch and backend
    left_out: dict[str, str] = field(default_factory=dict)  # names of what was not measured, and why

    @property
    def backends(self) -> tuple[str, ...]:
        """Ways to run the network."""
        return self.options.backends or (SAMPLED_BY if self.setup.device.type == "cuda" else SAMPLED_BY[:1])

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of images per forward pass."""
        return self.options.batches or BATCHES[self.setup.device.type]

    def run(self) -> None:
        """Measure all batches with all backends, first those without compilation, which takes minutes."""
        exact = copy.deepcopy(self.setup.model).double()
        order = [(batch, backend) for batch in self.batches for backend in self.backends]
        for batch, backend in sorted(order, key=lambda each: "compile" in each[1]):
            try:
                self._measure(backend, batch, exact)
            except Exception as error:  # what one breaks at is no reason to lose the rest
                self._leave_out(f"batch {batch}, {backend}", reason(error))
            if self.setup.device.type == "cuda":
                memory.release(self.setup.device)

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out[name] = why
        say(f"left out: {name}: {why}")

    def _measure(self, backend: str, batch: int, exact: Velocity) -> None:
        if self.setup.budget.spent:
            self._leave_out(f"batch {batch}, {backend}", NO_TIME)
            return
        network: Velocity = self.setup.model
        if backend != "eager":  # recorded for each batch
            network = GraphedNetwork(
                torch.compile(network, fullgraph=True, dynamic=False) if "compile" in backend else network
            )
        noise = self.setup.images(batch)
        first_ms = self._gate(network, noise, exact, f"batch {batch}, {backend}")
        for case in self._cases(network, noise):
            self._row(case, backend, first_ms)

    def _cases(self, network: Velocity, noise: Tensor) -> Iterator[SamplingCase]:
        """Return a batch for each sampler; for the largest batch also a set, from indices to images on the host."""
        batch, setup = len(noise), self.setup
        for sampler, steps in STEPS:
            take = partial(SAMPLERS[sampler], network, noise, steps=steps)
            yield SamplingCase(sampler, steps, batch, batch, self._call(take))
        if batch == max(self.batches):
            num, asked = SET * batch, {"shape": setup.shape, "seed": 0, "precision": setup.precision}
            for sampler, steps in STEPS[:2]:
                asked |= {"num": num, "batch_size": batch, "device": setup.device, "sampler": sampler, "steps": steps}
                yield SamplingCase(sampler, steps, batch, num, partial(sample, network, **asked))

    def _call(self, take: Callable[[], object]) -> Call:
        def call() -> object:
            with torch.no_grad(), matmul_precision(self.setup.precision, self.setup.device):
                return take()

        return call

    def _gate(self, network: Velocity, noise: Tensor, exact: Velocity, name: str) -> float:
        """Milliseconds of the first calls, what was compiled and recorded included, once a later one is right;
        GateError if it is not.
        """
        images: list[Tensor] = []
        call = self._call(lambda: images.append(meanflow_sample(network, noise, steps=2).images))
        # Two evaluations each: the last one replays the record, at other times than it was made at.
        first_ms = sum(self.setup.clock.time(call) for _ in range(WARM))
        call()
        with torch.no_grad():
            right = meanflow_sample(exact, noise[:JUDGED].double(), steps=2).images
        self.errors[name] = require_close(name, images[-1][:JUDGED], right, TOLERANCE[self.setup.precision])
        return first_ms

    def _row(self, case: SamplingCase, backend: str, first_ms: float) -> None:
        if self.setup.budget.spent:
            self._leave_out(case.name(backend), NO_TIME)
            return
        say(f"timing: {case.name(backend)}")
        timing = measure(case.call, self.setup.clock, self.setup.plan(self.setup.clock.time(case.call)))
        extra = {"sampler": case.sampler, "steps": case.steps, "batch": case.batch, "num": case.num}
        extra |= {"backend": backend, "images_per_second": case.num / timing.median_ms * 1e3}
        evaluations = float(case.steps * (case.num // case.batch))
        work = self.setup.floor(evaluations, evaluations, case.batch)
        # The pool of a graph is none of what the clock sees.
        peak = None if "graph" in backend else timing.peak_bytes
        self.rows.append(Row(case.name(backend), replace(timing, first_ms=first_ms, peak_bytes=peak), work, extra))


def run(options: SamplingOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError if the device is not there or cannot take the precision or a backend, or nothing was measured. GateError
    if images are wrong or cannot be made; the rest is measured and written before.
    """
    if any("graph" in name for name in options.backends):
        check_backend("graph", resolve_device(options.device), "--backend")
    shared = {"channels_last": options.channels_last, "seconds": options.seconds}
    setup = make_setup(StepOptions(options.device, options.precision, options.model, **shared))
    setup.model.eval()
    bench = SamplingBench(setup, options)
    bench.run()
    conditions = {
        "model": options.model,
        "precision": options.precision,
        "backend": ",".join(bench.backends),
        "batches": list(bench.batches),
        "image_shape": list(setup.shape),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        **({"memory_order": "channels_last"} if options.channels_last else {}),
        **at(batch=(options.batches, ())),
        "left_out": [{"name": name, "why": why} for name, why in bench.left_out.items()],
    }
    device, ceilings = setup.device.type, setup.ceilings
    result = CaseResult("meanflow-sampling", device, conditions, bench.errors, ceilings, bench.rows, environment())

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        yield from (f"{row.name}: {row.extra['images_per_second']:,.0f} images/s" for row in bench.rows)
        yield from (f"left out: {name}: {why}" for name, why in bench.left_out.items())

    wrong = [f"{name}: {why}" for name, why in bench.left_out.items() if why not in (NO_MEMORY, NO_TIME)]
    return finish(result, out, shown, width=150, wrong=wrong)

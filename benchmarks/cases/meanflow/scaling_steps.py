"""Work of one process on several GPUs: whole steps, alone and with others, timed by all of them together."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.cases.meanflow.options import ScalingOptions
from benchmarks.cases.meanflow.step_cases import DECAYS, plain_loss
from benchmarks.cases.meanflow.step_setup import StepSetup
from fullstride.device import memory
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.measure.gate import GateError
from fullstride.measure.timing import clock_for
from fullstride.step.torch import SINGLE, Averages, Processes, Shards, TrainStep
from fullstride.step.torch.distributed.buckets import ALIGNED, BUCKET_BYTES
from fullstride.step.torch.runners.backends import compiled_loss
from fullstride.step.torch.runners.graph import WARM

# Back to back, as in training: a block of steps is one sample. Blocks of transfers alone likewise.
BLOCKS, STEPS = 9, 5
Groups = tuple[tuple[int, Processes], ...]


@dataclass(frozen=True)
class Measured:
    """Times of the steps of a group of processes."""

    kind: str  # none for a process alone, ddp or fsdp
    count: int  # of processes
    samples_ms: tuple[float, ...]  # a step's time in each block, the slowest process's
    first_ms: float  # of the steps until the first block, compilation apart
    peak_bytes: int | None  # the most that a process's tensors held; None where it is not known
    extra: dict[str, Any] = field(default_factory=dict)  # anything else


@dataclass
class Steps:
    """Steps of one network at one ratio, compiled once for all groups."""

    options: ScalingOptions
    setup: StepSetup
    loss: MeanFlowLoss
    everyone: Processes

    def __post_init__(self) -> None:
        self._plain = plain_loss(self.setup, self.loss)
        compiling = "compile" in self.options.backend
        self._run = compiled_loss(self._plain, telling=True) if compiling else self._plain
        self._x = self.setup.images(self.options.batch_size)

    def compile(self, groups: Groups) -> dict[str, float]:
        """Compile, and compare all processes' steps with eager fp32: errors by kind and transfers; collective.

        All processes compile at once: what is compiled names its GPU, so that none could use another's.

        StepError if they disagree.
        """
        self._make("none", SINGLE)(self._x)
        self.everyone.largest(0)
        every = {p.transfers: p for _, p in reversed(groups) if p.size == self.everyone.size}
        if not every:
            return {"none": self._error("none", SINGLE)}
        return {f"{kind}, {by}": self._error(kind, p) for by, p in every.items() for kind in self.options.kinds}

    def _error(self, kind: str, processes: Processes) -> float:
        step = self._make(kind, processes, gate=True)
        # What runs is compiled already; what it is held against must not be.
        step._runner.eager = replace(step.body, loss=self._plain)
        loss = math.nan
        for _ in range(WARM + 1):
            loss = float(step(self._x)["loss"])
        step.end()
        # Eager fp32 of one process is compared with nothing.
        errors = dict(step.errors) or {f"backend={step.backend}, as it is": 0.0 if math.isfinite(loss) else math.nan}
        del step
        memory.release(self.setup.device)
        if wrong := [form for form, error in errors.items() if not math.isfinite(error)]:
            raise GateError(f"{kind}, {processes.transfers}, {wrong[0]}: eager fp32's loss or gradients are not finite")
        return max(errors.values())

    def measure(self, groups: Groups) -> Iterator[Measured]:
        """Measure each process alone, on all GPUs at once, then each group with each kind; collective."""
        yield self._measured("none", 1, SINGLE, self.everyone)
        made = set[tuple[int, str]]()
        for count, processes in groups:
            # The transport that auto selected is not measured again.
            if processes.size == count and (count, processes.transfers) not in made:
                made.add((count, processes.transfers))
                for kind in self.options.kinds:
                    yield self._measured(kind, count, processes, processes)
            self.everyone.largest(0)

    def _make(self, kind: str, processes: Processes, *, gate: bool = False) -> TrainStep:
        model: nn.Module = self.setup.model
        # At a rate of nothing all share one network.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        averages = Averages(model, DECAYS[: self.options.averages])
        shards = Shards(model, optimizer, processes, averages) if kind == "fsdp" else None
        return TrainStep(
            self._run,
            model,
            optimizer,
            draw=lambda x, _: self.setup.drawn(self.loss, x),
            ema=averages,
            precision=self.options.precision,
            backend="graph" if "graph" in self.options.backend else "eager",
            generator=self.setup.generator,
            check_first_step=gate,
            processes=processes,
            shards=shards,
        )

    def _measured(self, kind: str, count: int, processes: Processes, beside: Processes) -> Measured:
        start = time.perf_counter()
        step = self._make(kind, processes)
        for _ in range(WARM):
            step(self._x)
        memory.release(self.setup.device)
        step(self._x)  # records, where steps are
        peak = self.setup.clock.peak_bytes()
        peak = None if peak is None else peak + processes.shared_bytes
        first_ms = 1e3 * (time.perf_counter() - start)
        samples, own = blocks(lambda: step(self._x), beside, self.setup.device)
        alike = beside.gather(float(step(self._x)["loss"]))
        if not all(map(math.isfinite, alike)):
            raise GateError(f"{kind}, {processes.transfers}, {count} processes: last losses {alike} are not finite")
        reducer = step.body.reducer
        extra: dict[str, Any] = {"own_median_ms": own, "losses": alike}
        if reducer is not None:
            extra |= {"buckets": reducer.buckets, "sent_early": reducer.early, "transfers": processes.transfers}
            extra["transfer_ms"] = transfer_ms(self.setup, processes)
        step.end()
        del step, reducer
        memory.release(self.setup.device)
        return Measured(kind, count, samples, first_ms, peak, extra)


def blocks(
    step: Callable[[], Any], processes: Processes, device: torch.device, count: int = BLOCKS, steps: int = STEPS
) -> tuple[tuple[float, ...], list[float]]:
    """Return the slowest process's milliseconds per step, in blocks that begin together, and each one's median."""

    def block() -> None:
        for _ in range(steps):
            step()

    clock, own = clock_for(device.type), []
    for _ in range(count):
        processes.largest(0)
        own.append(clock.time(block) / steps)
    every = processes.gather(own)
    return tuple(map(max, zip(*every, strict=True))), [sorted(each)[len(each) // 2] for each in every]


def transfer_ms(setup: StepSetup, processes: Processes) -> float:
    """Return the milliseconds to average as many bytes as the gradients have, in buckets, on idle GPUs."""
    unit, size = ALIGNED * processes.size, min(BUCKET_BYTES, setup.weight_bytes) // 4
    flat = torch.zeros(-(-size // unit) * unit, device=setup.device)
    given = processes.transfer.shared(flat, flat.numel()) or flat

    def transfer() -> None:
        for wait in [processes.transfer.start_average(given) for _ in range(round(setup.weight_bytes / flat.nbytes))]:
            wait()

    found, _ = blocks(transfer, processes, setup.device)
    return sorted(found)[len(found) // 2]

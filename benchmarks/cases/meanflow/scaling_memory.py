"""Memory of a large network's state per process, and the largest batch that fits next to it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.cases.meanflow.options import ScalingOptions
from benchmarks.cases.meanflow.scaling_steps import Groups, Measured, blocks
from benchmarks.cases.meanflow.step_cases import DECAYS
from benchmarks.cases.meanflow.step_run import leave_forward_ad
from benchmarks.cases.meanflow.step_setup import IMAGE_SHAPES
from fullstride.device import memory
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.times import LogitNormalV0
from fullstride.meanflow.training.build import build_model
from fullstride.step.torch import SINGLE, Averages, Processes, Shards, TrainStep

# Two small batches show what a sample takes; the first trial is a little below what that leaves room for.
SMALL, MORE, FIRST_TRIAL, FINER = 8, 16, 0.97, 0.02


@dataclass
class Memory:
    """Largest network on this process's GPU, whole and sharded."""

    options: ScalingOptions
    device: torch.device
    everyone: Processes

    def measure(self, groups: Groups) -> Iterator[Measured]:
        """Measure one process with the whole state, then each group with its shards; collective."""
        for count, processes in ((1, SINGLE), *groups):
            # One process alone: the others wait, as their batches are none of this.
            if self.everyone.rank < count:
                yield self._measured(count, processes)
                memory.release(self.device)
            self.everyone.largest(0)

    def _measured(self, count: int, processes: Processes) -> Measured:
        memory.release(self.device)
        start = time.perf_counter()
        step = self._step(processes)
        peaks = []
        for size in (SMALL, SMALL, MORE):  # the first one makes the optimizer's state
            memory.release(self.device)
            step(self._images(size))
            peaks.append(self._peak(processes))
        step.body.clear()
        memory.release(self.device)
        state = torch.cuda.memory_allocated(self.device) + processes.shared_bytes
        # A small batch's, without what travels and what the optimizer takes.
        replace(step.body, reducer=None).gradients(self._images(SMALL))
        rest = max(0, peaks[1] - self._peak(processes))
        step.body.clear()
        small = peaks[1] - processes.shared_bytes
        batch = self._largest(step, processes, (peaks[2] - peaks[1]) / (MORE - SMALL), small, rest)
        first_ms = 1e3 * (time.perf_counter() - start)
        x = self._images(batch)
        samples, _ = blocks(lambda: step(x), processes, self.device, count=3, steps=1)
        peak = max(processes.gather(self._peak(processes)))
        extra = {"largest_batch": batch, "state_bytes": state, "peaks_at_small_batches": peaks[1:]}
        step.end()
        return Measured("fsdp" if count > 1 else "none", count, samples, first_ms, peak, extra)

    def _step(self, processes: Processes) -> TrainStep:
        with self.device:
            model = build_model(MODELS[self.options.largest](), IMAGE_SHAPES[self.options.largest], num_classes=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        averages = Averages(model, DECAYS[: self.options.averages])
        shards = Shards(model, optimizer, processes, averages) if processes.size > 1 else None
        loss = MeanFlowLoss(ratio=1.0, times=LogitNormalV0(-2.0, 2.0))
        generator = torch.Generator(self.device).manual_seed(processes.rank)
        return TrainStep(
            lambda network, drawn: loss.at(network, **drawn),
            model,
            optimizer,
            draw=lambda x, g: dict(zip("xetr", (x, *loss.draw(x, g)), strict=True)),
            ema=averages,
            precision=self.options.precision,
            backend="eager",
            generator=generator,
            check_first_step=False,
            processes=processes,
            shards=shards,
        )

    def _images(self, size: int) -> torch.Tensor:
        return torch.randn(size, *IMAGE_SHAPES[self.options.largest], device=self.device)

    def _peak(self, processes: Processes) -> int:
        return memory.peak_memory(self.device) + processes.shared_bytes

    def _largest(self, step: TrainStep, processes: Processes, sample: float, small: int, rest: int) -> int:
        """Return the largest batch whose forward and backward pass succeeds on every process.

        Nothing is transferred meanwhile, because a process that runs out of memory must not block the others. The other
        memory of a whole step, `rest` bytes, is allocated instead.
        """
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device) - small
        # All try the same, the least that one of them has room for.
        trial = -processes.largest(-SMALL - int(FIRST_TRIAL * free / sample))
        finer = max(1, int(FINER * trial))
        if not self._fits(step, processes, trial, rest):
            while trial > finer and not self._fits(step, processes, trial - finer, rest):
                trial -= finer
            return trial - finer
        while self._fits(step, processes, trial + finer, rest):
            trial += finer
        return trial

    def _fits(self, step: TrainStep, processes: Processes, size: int, rest: int) -> bool:
        failed, held = 0, None
        try:
            held = torch.empty(rest, dtype=torch.uint8, device=self.device)
            replace(step.body, reducer=None).gradients(self._images(size))
        except torch.OutOfMemoryError:
            failed = 1
            leave_forward_ad()
        del held
        step.body.clear()
        memory.release(self.device)
        return processes.largest(failed) == 0

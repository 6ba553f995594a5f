"""`TrainStep`: one optimizer step of any loss, by the backend that is named or that is fastest."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device.precision import check_precision
from fullstride.errors import ConfigError, one_of
from fullstride.process.gc_paused import nothing_collected
from fullstride.runs.atomic_files import note
from fullstride.step.torch.body import Body, Draw, Guard, Loss, Metrics
from fullstride.step.torch.distributed.processes import ALONE, Processes
from fullstride.step.torch.distributed.reducer import Reducer
from fullstride.step.torch.distributed.shards import Shards
from fullstride.step.torch.ema.averages import Averages
from fullstride.step.torch.optimizers import call_when_loaded, check_guarded, check_optimizer, set_initial_rates
from fullstride.step.torch.runners.auto import Measured
from fullstride.step.torch.runners.backends import (
    BACKENDS,
    check_backend,
    compiled,
    make_runner,
    start_compiler,
)
from fullstride.step.torch.runners.comparison import StepError, rehearsed
from fullstride.step.torch.runners.expected_shapes import NEVER, Usual
from fullstride.step.torch.runners.first_step import FirstSteps
from fullstride.step.torch.runners.interface import Runner
from fullstride.step.torch.runners.python_numbers import Constants
from fullstride.step.torch.runners.snapshot import Saved
from fullstride.step.torch.schedules import Schedule

NAMES = ("auto", *BACKENDS)


class TrainStep:
    """`step(batch) -> metrics`: loss, derivative, backward, clipping, optimizer, schedule and averages.

    Nothing in a step waits for the device. With `graph` and `compile+graph` it is one launch: a replay of what was
    recorded at the fourth step, with fresh random numbers. The first three steps run as they are, and so do batches
    of other shapes than the usual, such as a last smaller one: usual are the first batch's, unless four of other shapes
    come in a row before it has come as often.

    Attributes:
        made: steps made so far; set it when a run goes on, as schedules and averages count from it.
        backend: what the next step runs by.
        errors: relative error of the gradients in each form that was compared with eager fp32.

    """

    def __init__(
        self,
        loss_fn: Loss,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        draw: Draw | None = None,
        ema: Averages | None = None,
        schedule: Schedule | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        guard: Guard | None = None,
        guard_state: Iterable[Tensor] = (),
        precision: str = "fp32",
        backend: str = "auto",
        generator: torch.Generator | None = None,
        gate: bool = True,
        awaken: Callable[[nn.Module], object] | None = None,
        processes: Processes = ALONE,
        shards: Shards | None = None,
        say: Callable[[str], None] = note,
    ):
        """Build a step.

        Args:
            loss_fn: (model, batch) -> the mean loss, a floating scalar, or that and metrics, means too, by name; a
                function of its arguments without host synchronisation.
            model: what is trained.
            optimizer: over its parameters; for `graph` one that can be captured, as `torch.optim.AdamW(fused=True)`.
                Parameters that it has not are left with the step's gradient, for another one to take.
            draw: (batch, generator) -> batch: random numbers, times, augmentation; eager where the loss is compiled.
            ema: averages that follow the weights.
            schedule: factor of the learning rate as a function of the steps made, of tensors; see `schedules`.
            accumulate: micro-batches that a batch is cut into along its first dimension; gradients are of the mean
                over all samples.
            clip: longest gradient norm of the optimizer's parameters; a longer gradient is scaled to it. Those that it
                has not are for another one to clip.
            guard: (loss, gradient norm) -> whether to skip the step, or that and what to divide its gradient by, which
                costs writing the gradients once more; tensors on the device. Needs a fused optimizer.
            guard_state: tensors that the guard writes, which a step that `auto` undoes leaves as they were, too.
            precision: fp32, tf32 or bf16 (autocast); tf32 also needs `fullstride.device.precision.set_precision`.
            backend: eager, graph, compile, compile+graph, or auto: measures those that run here during the first
                steps and stays with the fastest.
            generator: handed to `draw`.
            gate: compare loss and gradients with eager fp32 on the first batch, in each form that the backend runs in.
            awaken: changes weights of the model in place; a compiled loss is compared with those, too, before the first
                step, as weights that start as zero hide what is behind them.
            processes: that make each step together, with batches of one size: gradients and metrics are means over all
                of them. Weights, buffers and averages become the first one's.
            shards: of this model, optimizer and averages, where each process keeps a part of them.
            say: where `auto` tells what it chose.

        Raises:
            ConfigError: for a backend, precision or optimizer that cannot run here, or a guard whose optimizer would
                not skip a step, with the reason.
            ValueError: for micro-batches or a clip below what there is, or a model without parameters.

        """
        one_of("backend", backend, NAMES)
        check_optimizer(optimizer)
        if next(model.parameters(), None) is None:
            raise ValueError(f"a {type(model).__name__} without parameters, expected a model that can be trained")
        check_precision(precision, next(model.parameters()).device)
        if accumulate < 1 or (clip is not None and clip <= 0):
            raise ValueError(f"accumulate is {accumulate} and clip {clip}, expected at least 1, and above 0 or None")
        if guard is not None:
            check_guarded(optimizer)
        if schedule is not None:
            set_initial_rates(optimizer)
        self.ema = ema or Averages(model, ())
        reducer = self._reducer(model, processes, shards)
        parts = loss_fn, model, optimizer, draw, schedule, accumulate, clip, guard, precision, generator
        self.body = Body(*parts, reducer, shards)
        self.made, self._say, self._processes, self._guarded = 0, say, processes, tuple(guard_state)
        self._usual = Usual(None if backend == "eager" else lambda: Constants((self.body.loss, model, self.body.draw)))
        self._first = FirstSteps(self._usual, gate=gate, awaken=awaken, announce=backend == "auto", say=self._log)
        self._name, self._runner = backend, self._make(backend)
        if clip is not None:
            self._tell_unclipped(optimizer)
        start_compiler(backend, self._device)
        call_when_loaded(optimizer, self._loaded)
        processes.call_at_end(self.end)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainStep":
        """Itself, as what is compiled and recorded has no copies; a loss may read `made`."""
        return self

    @property
    def backend(self) -> str:
        """What the next step runs by."""
        return self._runner.name if isinstance(self._runner, Measured) else self._name

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of the gradients in each form that was compared with eager fp32."""
        return self._first.errors

    @property
    def _device(self) -> torch.device:
        return next(self.body.model.parameters()).device

    def _reducer(self, model: nn.Module, processes: Processes, shards: Shards | None) -> Reducer | None:
        if shards is None and processes.size > 1:
            for each in (model, *self.ema.models.values()):
                processes.follow_first([*each.parameters(), *each.buffers()])
        return None if shards is None and processes.size == 1 else Reducer(model, processes, shards)

    def _make(self, backend: str) -> Runner:
        compiled_body = functools.cache(lambda: compiled(self.body))
        if backend != "auto":
            check_backend(backend, self._device, self.body.optimizer)
            return make_runner(backend, self.body, compiled_body, self.ema, self._usual)
        candidates = {}
        for name in BACKENDS:
            try:
                check_backend(name, self._device, self.body.optimizer)
            except ConfigError:
                continue
            candidates[name] = functools.partial(make_runner, name, self.body, compiled_body, self.ema, self._usual)
        return Measured(candidates, self._device, self._usual, self._slowest)

    def _hindered(self, batch: Any) -> str:
        """Why a process cannot compute its gradients, on all of them: one that refused alone would be waited for."""
        if self._processes.size == 1 or self.body.shards is not None:
            return ""
        with nothing_collected():
            # At once, before the rehearsal would compile one after the other.
            self._first.compile_kernels(self.backend, self.body, batch)
            own = "" if self.backend == "eager" else rehearsed(self._runner.body, batch)
        return next(filter(None, self._processes.gather(own)), "")

    def _slowest(self, milliseconds: float) -> float:
        """What a step takes that waits for all processes: they must agree on the fastest backend."""
        return max(self._processes.gather(milliseconds))

    def _loaded(self, _: torch.optim.Optimizer) -> None:
        # What was loaded lies elsewhere in memory.
        self._runner.forget()
        self._usual.forget()

    def end(self) -> None:
        """Let go of what is recorded and watched; no further step can be made with others."""
        self._runner.end()
        if self.body.reducer is not None:
            self.body.reducer.end()

    def __call__(self, batch: Any) -> Metrics:
        """One step, and its metrics on the device: the loss, its own, and `grad_norm` before clipping.

        Args:
            batch: a tensor or a pytree of tensors (b, ...) on the model's device.

        Raises:
            StepError: if the first step, in any form, disagrees with eager fp32.
            ValueError: for a batch without samples, or whose tensors have different first dimensions, for a loss that
                is no floating scalar, for a metric of the loss's own that is no real scalar or has a name of the
                step's, and for a sparse gradient.

        """
        self._look_at(batch)
        metrics = self._measure(batch) if isinstance(self._runner, Measured) else self._step(batch)
        self.made += 1
        return metrics

    def _look_at(self, batch: Any) -> None:
        """Begin anew for batches that come again and again: the first may have been an epoch's smaller last one."""
        before = self._usual.differing
        changed = self._usual.changed(batch)
        if self._name == "eager":
            return
        if changed:
            self._runner.forget()
            self._first.forget()
            what = (
                f"the loss reads other numbers, {before}" if before else "batches have other shapes than the first ones"
            )
            told = f"{what}; from here on steps are made for these"
        elif self._usual.lost:
            told = (
                f"the last {NEVER} batches had other shapes than the first ones, or other values that are no tensors; "
                "such steps run as they are, and auto measures none: give what changes as tensors of one shape"
            )
            if found := self._usual.differing:
                told = (
                    f"the loss reads Python numbers that change, {found}; such steps run as they are, neither compiled "
                    "nor recorded, and auto measures none: give them as tensors, such as in the batch"
                )
        else:
            return
        self._log(f"backend={self._name}: {told}")

    def _tell_unclipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Say which gradients another optimizer is to clip."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = () if self.body.shards is not None else self.body.model.named_parameters()
        if others := [name for name, p in named if p.requires_grad and id(p) not in own]:
            more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
            self._log(f"clip: {others[0]}{more} not in the optimizer: they are neither clipped nor in grad_norm")

    def _log(self, line: str) -> None:
        """Write a line, by one of the processes."""
        if self._processes.leads:
            self._say(line)

    def _step(self, batch: Any) -> Metrics:
        if self._first.done(self.backend, self._runner, batch):
            return self._runner(batch, self.made)
        return self._first.make(self.backend, self._runner, self.body, batch, self.made)

    def _measure(self, batch: Any) -> Metrics:
        """A step of the candidate whose turn it is; one that cannot make it leaves no trace."""
        measured = self._runner
        assert isinstance(measured, Measured)
        if measured.chosen:
            return self._step(batch)
        while True:
            known = self._first.done(self.backend, self._runner, batch)
            if not known and (why := self._hindered(batch)):
                measured.refuse(why)
                continue
            saved = None if known else Saved(self.body, self.ema, self._guarded)
            try:
                metrics = self._step(batch)
            except (RuntimeError, StepError) as failed:
                if saved is None:
                    raise
                saved.restore()
                measured.refuse(f"{type(failed).__name__}: {failed}")
            else:
                if measured.chosen:
                    self._log(str(measured))
                return metrics

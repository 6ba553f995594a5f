"""`TrainStep`: one optimizer step of any loss, by the backend that is named or that is fastest."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device.tensor_trees import micro_batches
from fullstride.errors import ConfigError, one_of
from fullstride.process.gc_paused import gc_paused
from fullstride.renamed import TRAIN_STEP, accepts
from fullstride.runs.atomic_files import note
from fullstride.step.torch.accumulation import Accumulation
from fullstride.step.torch.body import Body, Draw, Guard, Loss, Runner
from fullstride.step.torch.checks import check_body, default_scaler, unaveraged, unclipped
from fullstride.step.torch.clipping import Clip
from fullstride.step.torch.distributed.processes import SINGLE, Processes
from fullstride.step.torch.distributed.reducer import Reducer
from fullstride.step.torch.distributed.shards import Shards
from fullstride.step.torch.ema.averages import Averages
from fullstride.step.torch.errors import StepError
from fullstride.step.torch.explanation import Explanation, bytes_of, compilations
from fullstride.step.torch.metrics import Metrics
from fullstride.step.torch.optimizers import as_one, call_when_loaded, set_initial_rates
from fullstride.step.torch.passes import passes_of
from fullstride.step.torch.runners.backends import (
    BACKENDS,
    AutoRunner,
    check_backend,
    compiled,
    make_runner,
    start_compiler,
)
from fullstride.step.torch.runners.comparison import TOLERANCE, rehearsed
from fullstride.step.torch.runners.expected_shapes import NEVER, Observation, PythonNumbers, ShapeTracker
from fullstride.step.torch.runners.first_step import FirstSteps
from fullstride.step.torch.runners.isolated import Snapshot
from fullstride.step.torch.runners.step_times import StepTimes
from fullstride.step.torch.schedules import Schedule

NAMES = ("auto", *BACKENDS)
MOST_NOTES = 20


@accepts(TRAIN_STEP, deprecated=True)
class TrainStep:
    """`step(batch) -> metrics`: loss, derivative, backward, clipping, optimizer, schedule and averages.

    Nothing in a step waits for the device. With `graph` and `compile+graph` it is one launch: a replay of the
    graph captured at the fourth step, with fresh random numbers. The first three steps run uncaptured, and so do
    batches of unexpected shapes, such as a smaller last one. The first batch's shapes are expected, unless four
    batches of other shapes come in a row before the first have come four times.

    Attributes:
        made: steps made so far; set it when a run goes on, as schedules and averages count from it.
        scaler: scale of the loss, if it has one.
        backend: name of the backend of the next step.
        errors: relative error of the gradients in each form that was compared with eager fp32.

    """

    def __init__(
        self,
        loss_fn: Loss,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        draw: Draw | None = None,
        ema: Averages | None = None,
        schedule: Schedule | None = None,
        accumulate: int | Accumulation = 1,
        clip: float | Clip | None = None,
        guard: Guard | None = None,
        guard_state: Iterable[Tensor] = (),
        precision: str = "fp32",
        scaler: torch.amp.GradScaler | None = None,
        backend: str = "auto",
        fullgraph: bool = True,
        generator: torch.Generator | None = None,
        check_first_step: bool = True,
        randomize_zeros: Callable[[nn.Module], object] | None = None,
        processes: Processes = SINGLE,
        shards: Shards | None = None,
        log: Callable[[str], None] = note,
    ):
        """Build a step.

        Args:
            loss_fn: (model, batch) -> the mean loss, a floating scalar, or that and metrics, means too, by name; a
                function of its arguments without host synchronisation.
            model: module to train.
            optimizer: over its parameters; for `graph` one that can be captured, as `torch.optim.AdamW(fused=True)`.
                Several over disjoint parameters step one after the other, with one gradient and one clip. Parameters
                that none owns keep their gradient for another optimizer. With `eager` also one that steps by a
                closure, as LBFGS, or by `first_step` and `second_step`, as SAM; metrics are those of the first pass.
            draw: (batch, generator) -> batch: random numbers, times, augmentation; eager if the loss is compiled.
            ema: averages that follow the weights.
            schedule: factor of the learning rate as a function of the steps made, of tensors; see `schedules`.
            accumulate: micro-batches that a batch is cut into along its first dimension; gradients are of the mean
                over all samples, or over what an `Accumulation` weighs them by, such as tokens.
            clip: longest gradient norm of the optimizers' parameters, to which a longer gradient is scaled, or a
                `Clip`. Parameters of another optimizer are not clipped.
            guard: (loss, gradient norm) -> whether to skip the step, or that and what to divide its gradient by, which
                costs writing the gradients once more; tensors on the device. Needs a fused optimizer.
            guard_state: tensors that the guard writes, which a step that `auto` undoes leaves as they were, too.
            precision: fp32, tf32, bf16 or fp16 (autocast); tf32 also needs `fullstride.device.precision.set_precision`.
            scaler: dynamic scale of the loss, by which steps whose gradients overflow are skipped; of fp16 a new
                `torch.amp.GradScaler` if None. Save its state_dict. `graph` needs fused optimizers with it.
            backend: eager, graph, compile, compile+graph, or auto: measures those that run here during the first
                steps and stays with the fastest.
            fullgraph: whether a compiled loss has to be one graph; False lets what cannot be traced run eagerly.
            generator: random generator for `draw`.
            check_first_step: compare loss and gradients with eager fp32 on the first batch, in each form that the
                backend runs in.
            randomize_zeros: function that changes weights of the model in place; a compiled loss is compared with
                those, too, before the first step, as weights that start as zero hide what is behind them.
            processes: group that makes each step together, with batches of one size: gradients and metrics are means
                over all of them. Weights, buffers and averages become the first one's.
            shards: shards of this model, optimizer and averages, if each process keeps a part of them.
            log: function that receives log lines, such as the choice of `auto`.

        Raises:
            ConfigError: for a backend, precision or optimizer that cannot run here, or options that exclude each other,
                with the reason.
            ValueError: for micro-batches or a clip below what there is, or a model without parameters.

        """
        one_of("backend", backend, NAMES)
        optimizer = as_one(optimizer)
        device = next(iter(model.parameters()), torch.empty(0)).device
        self.ema = ema or Averages(model, ())
        self.scaler = scaler or default_scaler(precision, device)
        body = Body(
            loss=loss_fn,
            model=model,
            optimizer=optimizer,
            ema=self.ema,
            draw=draw,
            schedule=schedule,
            accumulate=accumulate if isinstance(accumulate, Accumulation) else Accumulation(accumulate),
            clip=clip if clip is None or isinstance(clip, Clip) else Clip(norm=clip),
            guard=guard,
            precision=precision,
            scaler=self.scaler,
            generator=generator,
            processes=processes,
            shards=shards,
            passes=passes_of(optimizer),
            fullgraph=fullgraph,
        )
        check_body(body, backend)
        if self.scaler is not None and randomize_zeros is not None:
            raise ConfigError("randomize_zeros: gradients of its comparison have no scale, expected precision=bf16")
        if schedule is not None:
            set_initial_rates(optimizer)
        self.body = replace(body, reducer=self._reducer(model, processes, shards))
        self.made = 0
        self._say, self._said = log, list[str]()
        self._processes = processes
        self._guarded = tuple(guard_state)
        roots = loss_fn, model, draw, self.body.accumulate.weight
        self._tracker = ShapeTracker(None if backend == "eager" else functools.partial(PythonNumbers, roots))
        self._first = FirstSteps(
            self._tracker, check_first_step, randomize_zeros, announce=backend == "auto", say=self._log
        )
        self._asked = backend
        self._choose(backend)
        for warning in (unclipped(self.body), unaveraged(self.body)):
            if warning:
                self._log(warning)
        start_compiler(backend, self.body.device)
        call_when_loaded(optimizer, lambda _: self._loaded())
        processes.call_at_end(self.end)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainStep":
        """Return itself, as compiled and captured code has no copies; a loss may read `made`."""
        return self

    @property
    def backend(self) -> str:
        """Backend of the next step."""
        return self._runner.backend

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of the gradients in each form that was compared with eager fp32."""
        return self._first.errors

    def _reducer(self, model: nn.Module, processes: Processes, shards: Shards | None) -> Reducer | None:
        if shards is None and processes.size > 1:
            for each in (model, *self.ema.models.values()):
                processes.follow_first([*each.parameters(), *each.buffers()])
        return None if shards is None and processes.size == 1 else Reducer(model, processes, shards)

    def _choose(self, backend: str) -> None:
        """Make steps by a backend from here on, or, for `auto`, by each in turn until one is chosen."""
        compiled_body = functools.cache(lambda: compiled(self.body))
        self._auto: AutoRunner | None = None
        self._runner: Runner
        self._times = StepTimes(self.body.device)
        self._make = self._timed
        self._why = "named"
        if backend != "auto":
            check_backend(backend, self.body.device, self.body.optimizer, self.scaler is not None)
            self._runner = make_runner(backend, self.body, compiled_body)
            return
        candidates = {}
        # Processes that a wrapper joins cannot agree on another one.
        for name in BACKENDS[:1] if self.body.groups else BACKENDS:
            try:
                check_backend(name, self.body.device, self.body.optimizer, self.scaler is not None)
            except ConfigError:
                continue
            candidates[name] = functools.partial(make_runner, name, self.body, compiled_body)
        # A step waits for all processes: they must agree on the fastest backend.
        self._auto = AutoRunner(candidates, self.body.device, lambda ms: max(self._processes.gather(ms)))
        self._runner = self._auto.runner
        self._make = self._measure

    def _loaded(self) -> None:
        """Start over: loaded state lies elsewhere in memory."""
        self._forget()
        self._tracker.forget()

    def _forget(self) -> None:
        self._runner.forget()
        if self._auto is not None:
            self._auto.forget()

    def end(self) -> None:
        """Release captured graphs and hooks; no further step can be made with others."""
        self._runner.end()
        if self.body.reducer is not None:
            self.body.reducer.end()

    def __call__(self, batch: Any) -> Metrics:
        """Make one step and return its metrics on the device: the loss, its own, and `grad_norm` before clipping.

        Args:
            batch: a tensor or a pytree of tensors (b, ...) on the model's device.

        Raises:
            StepError: if the first step, in any form, disagrees with eager fp32.
            ValueError: for a batch without samples, or whose tensors have different first dimensions, for a loss that
                is no floating scalar, for a metric of the loss's own that is no real scalar or has a name of the
                step's, and for a sparse gradient in a step that is compiled, captured or made by several processes.

        """
        expected = self._observe(batch)
        metrics = self._make(batch, expected)
        self.made += 1
        return metrics

    def explain(self) -> Explanation:
        """Return what the step runs and what it costs, as far as its first steps have shown; waits for the device."""
        body = self._runner.body
        return Explanation(
            backend=self.backend,
            why=self._why if self._auto is None else f"auto still measures: {self._auto.said}",
            errors=dict(self.errors),
            allowed=TOLERANCE[body.precision],
            compilations=compilations(getattr(body.loss, "__name__", "")) if self._runner.compiles else (),
            host_ms=self._times.host_ms(),
            device_ms=self._times.device_ms(),
            bytes=bytes_of(body),
            notes=tuple(self._said),
        )

    def _observe(self, batch: Any) -> bool:
        """Return whether steps are specialised to this batch."""
        match observation := self._tracker.observe(batch):
            case Observation.EXPECTED:
                return True
            case Observation.SWITCHED:
                if self._asked != "eager":
                    self._begin_for_others()
                return True
            case Observation.LOST if self._asked != "eager":
                self._tell_lost()
        micro_batches(batch, self.body.accumulate.parts)  # which raises for one without samples
        return observation is Observation.FIRST

    def _begin_for_others(self) -> None:
        """Start over for recurring batches of other shapes: the first may have been an epoch's smaller last one."""
        self._forget()
        self._first.made.clear()
        numbers = self._tracker.differing
        what = f"the loss reads other numbers, {numbers}" if numbers else "batches differ in shape from the first ones"
        self._log(f"backend={self._asked}: {what}; from here on steps are specialised to these")

    def _tell_lost(self) -> None:
        told = (
            f"the last {NEVER} batches differed in shape from the first ones, or in values that are not tensors; "
            "such steps run uncompiled, and auto measures none: pass what changes as tensors of one shape"
        )
        if numbers := self._tracker.differing:
            told = (
                f"the loss reads Python numbers that change, {numbers}; such steps run neither compiled "
                "nor captured, and auto measures none: pass them as tensors, such as in the batch"
            )
        self._log(f"backend={self._asked}: {told}")

    def _log(self, line: str) -> None:
        """Write a line on one of the processes."""
        self._said = [*self._said[-MOST_NOTES:], line]
        if self._processes.leads:
            self._say(line)

    def _timed(self, batch: Any, expected: bool) -> Metrics:
        """One of the first steps, which are timed once they are as all later ones."""
        if not expected:
            return self._step(batch, expected)
        metrics = self._times.timed(functools.partial(self._step, batch, expected))
        if self._times.complete:
            self._make = self._step
        return metrics

    def _step(self, batch: Any, expected: bool) -> Metrics:
        if self._runner.form(expected) in self._first.made:
            return self._runner(batch, self.made, expected=expected)
        return self._first.make(self._runner, batch, self.made, expected=expected)

    def _measure(self, batch: Any, expected: bool) -> Metrics:
        """A step of the candidate whose turn it is; one that cannot make it leaves no trace."""
        auto = self._auto
        assert auto is not None
        while True:
            self._runner = auto.runner
            known = self._runner.form(expected) in self._first.made
            if not known and (why := self._hindered(batch, expected)):
                auto.refuse(why)
                continue
            saved = None if known else Snapshot(self.body, self._guarded)
            step = functools.partial(self._step, batch, expected)
            try:
                metrics = auto.timed(step) if expected else step()
            except (RuntimeError, StepError) as failed:
                if saved is None:
                    raise
                saved.restore()
                auto.refuse(f"{type(failed).__name__}: {failed}")
            else:
                break
        self._runner = auto.runner
        if auto.chosen:
            self._auto = None
            self._make = self._timed
            self._why = f"the fastest of auto: {auto.said}"
            self._log(str(auto))
        return metrics

    def _hindered(self, batch: Any, expected: bool) -> str:
        """Return why a process cannot compute its gradients, on all of them, so that all refuse together."""
        if self._processes.size == 1 or self.body.shards is not None:
            return ""
        with gc_paused():
            # At once, before the rehearsal would compile one after the other.
            self._first.compile_kernels(self.body, batch, compiles=self._runner.compiles and expected)
            own = "" if self.backend == "eager" else rehearsed(self._runner.body, batch)
        return next(filter(None, self._processes.gather(own)), "")

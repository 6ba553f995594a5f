"""A training run from its first step to its last, through stops, skipped steps, restored checkpoints and full disks."""

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from fullstride.device import memory
from fullstride.device.precision import process_precision, set_precision
from fullstride.device.select import describe, resolve_device
from fullstride.errors import ConfigError, OutOfMemory, PeerError, Preempted, ReadError, is_out_of_memory
from fullstride.meanflow.config.datasets import noun_of
from fullstride.meanflow.config.intervals import save_interval
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.loader import Loader, Prefetcher
from fullstride.meanflow.data.order import epoch_orders
from fullstride.meanflow.data.sources.known_files import KNOWN
from fullstride.meanflow.training.build import build_state, limits_of, steps_to_checkpoint, watchdog_of
from fullstride.meanflow.training.derivative_check import check_derivative
from fullstride.meanflow.training.evaluation_schedule import EvaluationSchedule
from fullstride.meanflow.training.objective import build_objective
from fullstride.meanflow.training.outcome import not_finite
from fullstride.meanflow.training.preflight import preflight
from fullstride.meanflow.training.reporter import Reporter
from fullstride.meanflow.training.saver import CheckpointSaver
from fullstride.meanflow.training.step import build_step, schedule
from fullstride.meanflow.training.teacher import load_teacher, write_teacher
from fullstride.process import torchrun as launched
from fullstride.process.exit_codes import OUT_OF_MEMORY, UNREAD
from fullstride.process.gpu_activity import GpuActivity, utilization_probes
from fullstride.process.signals import StopSignal
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.early_ends import write_end
from fullstride.runs.folder import how_to_resume, write_config
from fullstride.runs.lock import release
from fullstride.runs.next_steps import say
from fullstride.runs.state import record_state
from fullstride.step.torch import SINGLE, Processes, join_processes
from fullstride.step.torch.runners.backends import start_compiler
from fullstride.step.torch.runners.comparison import StepError
from fullstride.step.torch.schedules import Schedule


class Trainer:
    """One run: its live objects and its loop; of several processes each has one, and the first alone writes.

    Attributes:
        step: the training step; its `made` counts optimizer steps.
        after_step: function called after each step, for observers.

    """

    def __init__(self, config: TrainConfig, processes: Processes = SINGLE, *, resume_advice: str = ""):
        """Build everything of a run, going on from its newest whole checkpoint if the configuration says so.

        Args:
            config: the run's configuration.
            processes: the processes that train it together.
            resume_advice: instructions for a person to continue a stopped run; `how_to_resume` by default.

        Raises:
            ConfigError: for settings that cannot work here, or a run that would be overwritten.

        """
        self.device = resolve_device(config.device)
        # Its processes take some seconds to start: beside the reading of data.
        start_compiler(config.backend, self.device)
        self.data, self.steps = preflight(config, processes)
        self.config = config
        self.processes = processes
        self.resume_advice = resume_advice or how_to_resume(config)
        set_precision(process_precision(config.precision, config.loss.jvp_precision), self.device)
        self.state = build_state(config, self.data, self.device, processes)
        teacher = load_teacher(config, str(self.device))
        self.objective = build_objective(config, self.data, self.state.ema, teacher)
        self.rates = self._rates()
        self.step = build_step(config, self.objective, self.state, self.rates)
        self.loader = Loader(self.data.train, self.device, config.data.workers)
        # Only here is the run's folder touched: what cannot be must not cost an earlier run.
        self.saves = CheckpointSaver.opened(config, self.state, self.resume_advice)
        self.run = self.saves.run
        if processes.leads:
            write_config(self.run, config)
            write_teacher(self.run, config)
            # A set's listing that is there stays, as it is what the run was begun with.
            if self.data.files and not (self.run / KNOWN).exists():
                replace_file(self.run / KNOWN, self.data.files)
        made, judged = self.state.position.step, self.state.guard.judged()
        self.reporter = Reporter(config, self.run, made, self.total_steps, judged, enabled=processes.leads)
        self.limits = limits_of(config, self.device)
        self.stop = StopSignal(
            ended=f"ended without saving; to continue from the last checkpoint, {self.resume_advice}"
        )
        self.evaluations = EvaluationSchedule(config, self.data, self.device, self.state, self.reporter, self.stop)
        self.gpu_use = GpuActivity(utilization_probes(self.device) if self.limits.gpu_idle else [])
        self.watchdog = watchdog_of(self.limits, self.state, self.run, self.gpu_use)
        self.after_step: list[Callable[[], None]] = []
        self._every = save_interval(config.save_every)
        self._saved_at, self._saved_step = 0.0, 0
        self._going = False  # whether a step was made
        self._go_on_from_the_position()
        self._take_form()

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps

    @property
    def description(self) -> str:
        """Description of the network, the data and the steps, for the console."""
        config, data = self.config, self.data
        parameters = sum(p.numel() for p in self.state.model.parameters())
        size = "x".join(map(str, data.image_shape))
        batch = config.data.batch_size * config.gradient_accumulation_steps
        epochs = f"{config.epochs:,} epoch{'s' if config.epochs != 1 else ''}"
        return (
            f"training {config.model.name} ({parameters:,} parameters) on {len(data.train):,} "
            f"{noun_of(data.name, pixels=data.pixels)} ({size}) of data={data.name}: {epochs}, "
            f"{self.total_steps:,} steps of {batch:,}, on {describe(self.device)}"
        )

    def run_to_end(self) -> Path:
        """Train until the last epoch and return the run's folder; a stop signal saves first.

        Raises:
            Preempted: after saving, if SIGTERM came.
            KeyboardInterrupt: after saving, if SIGINT came.
            FloatingPointError: if steps keep being harmful after the last checkpoint was restored.
            OutOfMemory: if a step does not fit; the message says what helps. Also if the check of du/dt does not.
            OSError: if the last checkpoint cannot be written.
            ConfigError: if an evaluation is missing something, or a record is damaged; the run is saved first. Before
                the first step, if du/dt is wrong.
            ReadError: if data cannot be read for now, or a worker has died; the run is saved first.
            PeerError: if another process has failed; the message says what is unsaved.

        """
        try:
            with self._recorded(), self.loader, self.reporter, self.gpu_use, self.watchdog, self.stop:
                self._train()
        except (OutOfMemory, ReadError) as error:
            full = isinstance(error, OutOfMemory)
            reason, code = ("out_of_memory", OUT_OF_MEMORY) if full else ("read_error", UNREAD)
            write_end(self.run, reason=reason, message=str(error), step=self.state.position.step, exit_code=code)
            raise
        except PeerError as error:
            raise PeerError(f"{error}; {self.saves.unsaved}; to continue, {self.resume_advice}") from None
        finally:
            release(self.run)
        return self.run

    def _recorded(self) -> AbstractContextManager[None]:
        return record_state(
            self.run,
            steps=self.total_steps,
            made=lambda: self.state.position.step,
            wrong=lambda: not_finite(self.run),
            enabled=self.processes.leads,
        )

    def _train(self) -> None:
        self._expect_checkpoint()
        if self.evaluations.is_missing():
            self._evaluate()
        while (position := self.state.position).epoch < self.config.epochs:
            if self._take_form():
                self._save(must=False)  # its first step may take minutes
            metrics = self._step(*next(self.batches)) if self._going else self._first_step()
            position.step, position.batch = self.step.made, position.batch + 1
            self.stop.arm()
            self.reporter.step(position, metrics, self._rate, self.state.guard.judged)
            if self.state.guard.exhausted():
                before = position.step
                checkpoint = self.saves.go_back()
                self._go_on_from_the_position()
                self._expect_checkpoint()
                self.reporter.restored(self.state.position, checkpoint.name, before, self.state.guard.judged())
                continue
            if position.batch < self.steps or position.epoch + 1 < self.config.epochs:
                # While nothing of a step is under way: all processes can save if one has no batch.
                self.batches.read()
            self._heed()
            for act in self.after_step:
                act()
            if position.batch >= self.steps:
                self._turn_page()
                self._after_epoch()

    @property
    def progress(self) -> float:
        """Share of the run's steps that are done."""
        return self.state.position.step / max(1, self.total_steps)

    def _take_form(self) -> bool:
        """Build the step anew where the objective takes another form; tell whether it did."""
        loss = self.objective.meanflow.form_at(self.progress)
        if loss is self.objective.meanflow:
            return False
        self.step.end()
        self.objective = replace(self.objective, meanflow=loss)
        self.step = build_step(self.config, self.objective, self.state, self.rates)
        self.step.made = self.state.position.step
        again, self._going = self._going, False
        return again

    def _step(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """One optimizer step, and its metrics on the device."""
        batch = {"raw": raw, "labels": labels}
        if self.objective.meanflow.scheduled:
            batch["progress"] = torch.full(raw.shape[:1], self.progress, device=raw.device)
        try:
            return self.step(batch)
        except StepError as error:
            raise ConfigError(f"{error}; set guard.check_step=false to train anyway") from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size, parts = self.config.data.batch_size, self.config.gradient_accumulation_steps
            raise OutOfMemory(memory.too_large(size, parts, self.processes.size, self.device)) from None

    def _first_step(self) -> dict[str, Tensor]:
        """The first of this process, which may start workers and compile for minutes; a signal ends it at once."""
        self._watch_steps()
        try:
            metrics = self.stop.unless_stopped(self._checked_step)
        except Exception:
            # Control-C reaches the compiler's processes, too, which then fail.
            if self.stop.signal is None:
                raise
            metrics = None
        if metrics is None:
            self._end_stopped("stopped before the first step, nothing to save")
        self._going = True
        self._watch_steps()
        return metrics

    def _checked_step(self) -> dict[str, Tensor]:
        batch = next(self.batches)
        if self.config.guard.check_tangents:
            self.watchdog.wait_for("the check of du/dt", self.limits.first_step)
            if report := check_derivative(self.config, self.objective, self.state, *batch):
                self.reporter.tangents(self.state.position, report)
            self.watchdog.wait_for("the first step", self.limits.first_step)
        return self._step(*batch)

    def _rates(self) -> Schedule | None:
        """Factors of the learning rate, on the device."""
        return schedule(self.config.optimizer, self.total_steps)

    def _rate(self, step: int) -> float:
        """The learning rate of a step (counted from 0), for reports."""
        factor = 1.0 if self.rates is None else float(self.rates(torch.tensor(step)))
        return self.config.optimizer.lr * factor

    def _go_on_from_the_position(self) -> None:
        """Count, and read on, from where the state is."""
        self._turn_page()
        position = self.state.position
        self.step.made = position.step
        order = epoch_orders(self.config, self.data.train, self.steps, position.epoch, position.attempt, self.processes)
        self.batches = Prefetcher(self.loader.batches(order, start=position.batch))

    def _turn_page(self) -> None:
        """Begin the next epoch at the end of one: where the run is, or where it was stopped and saved."""
        position = self.state.position
        if position.batch >= self.steps:  # more of a set that has become smaller
            position.epoch, position.batch = position.epoch + 1, 0

    def _is_due(self) -> bool:
        """Return whether `save_every`, in steps or minutes, has passed; the last step is saved anyway."""
        if (step := self.state.position.step) in (self.total_steps, self._saved_step):
            return False
        if self._every.minutes:
            return time.monotonic() - self._saved_at >= 60 * self._every.minutes
        return self._every.steps > 0 and step % self._every.steps == 0

    def _expect_checkpoint(self) -> None:
        self._saved_at, self._saved_step = time.monotonic(), self.state.position.step
        self.watchdog.expect_checkpoint(steps_to_checkpoint(self.config, self.state.position, self.steps))

    def _watch_steps(self) -> None:
        if self._going:
            self.watchdog.train()
        else:
            self.watchdog.wait_for("the first step", self.limits.first_step)

    def _heed(self) -> None:
        """Do what a stop signal, a batch that cannot be read or a checkpoint that is due asks for, in any process.

        A scheduler's SIGTERM goes to the loader's workers, too, which then end before this process: it comes first.
        """
        unread = self.batches.error is not None
        due = 2 * self._is_due() + self.watchdog.checkpoint_overdue
        found = 8 * (self.stop.signal or 0) + 4 * unread + due
        if self.processes.size > 1:
            found = self.processes.largest(found)
        if signalled := found // 8:
            self.stop.signal = signalled
            self._end_stopped()
        if found & 4:  # save, then raise why the next batch is not there
            error = self.batches.error or ReadError("another process cannot read its data")
            try:
                kept = f"saved {self._save(must=True)}"
            except OSError as failed:
                kept = str(failed)
            raise type(error)(f"{error}; {kept}; to continue, {self.resume_advice}") from None
        if found & 2:
            self._save(must=False)
            self._expect_checkpoint()
        elif found & 1:  # its steps have become much slower, and the next checkpoint is far away
            if saved := self._save(must=False):
                self.saves.note(f"steps became slower; saved early: {saved}")
            self._expect_checkpoint()

    def _after_epoch(self) -> None:
        epoch, config = self.state.position.epoch, self.config
        last = epoch == config.epochs
        if last or (self._every.epochs and epoch % self._every.epochs == 0):
            self._save(must=last)
            self._expect_checkpoint()
        if self.evaluations.is_due():
            self._evaluate()

    def _evaluate(self) -> None:
        self.watchdog.wait_for("an evaluation", self.limits.evaluation)
        self.evaluations.make(lambda: self._save(must=True))
        self._watch_steps()
        self._heed()

    def _save(self, *, must: bool) -> Path | None:
        return self.saves.save(must=must)

    def _end_stopped(self, message: str = "") -> NoReturn:
        message = message or f"stopped; saved {self._save(must=True)}; to continue, {self.resume_advice}"
        raise Preempted(message) if self.stop.signal == signal.SIGTERM else KeyboardInterrupt(message)


def train(config: TrainConfig) -> Path:
    """Train a run to its end and return its folder; see `Trainer`.

    With `distributed=ddp` or `fsdp` torchrun learns why a process failed, and restarted processes resume where they
    were.

    Raises:
        ConfigError: if several processes would each train the run by themselves.

    """
    if config.distributed == "none":
        if launched.world_size() > 1:
            raise ConfigError(
                f"distributed=none in one of {launched.world_size()} processes: each would train the whole run; "
                "expected distributed=ddp or fsdp, or one process"
            )
        return _trained(config)

    @record
    def together() -> Path:
        with join_processes(resolve_device(config.device).type, config.transfers) as processes:
            again = {"resume": True, "overwrite": False} if launched.restarts() else {}
            return _trained(replace(config, **again), processes)

    if (run := together()) is None:
        raise SystemExit(0)  # which `record` takes for an end like any other
    return run


def _trained(config: TrainConfig, processes: Processes = SINGLE) -> Path:
    trainer = Trainer(config, processes)
    if processes.leads:
        say(trainer.description)
    return trainer.run_to_end()

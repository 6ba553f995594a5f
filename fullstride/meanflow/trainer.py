"""A training run from its first step to its last, through stops, skipped steps, restored checkpoints and full disks."""

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from fullstride import launched
from fullstride.device import resolve_device
from fullstride.ends import write_end
from fullstride.errors import OutOfMemory, PeerError, Preempted
from fullstride.exits import OUT_OF_MEMORY
from fullstride.files import note
from fullstride.meanflow import memory
from fullstride.meanflow.build import build_inputs, build_loss, build_state, steps_per_epoch
from fullstride.meanflow.checkpoint import keep_newest, newest_whole, open_run, read_manifest, remove_later
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.loader import Batch, Loader
from fullstride.meanflow.data.order import epoch_order, mirror_half
from fullstride.meanflow.evaluable import check_evaluation
from fullstride.meanflow.evaluate import Evaluator, shared_evaluator
from fullstride.meanflow.reporter import Reporter
from fullstride.meanflow.share import check_launch, check_share, share_of
from fullstride.meanflow.silent import Silent
from fullstride.meanflow.tangents import check_derivative
from fullstride.meanflow.tracking import check_tracker
from fullstride.meanflow.update import Update, learning_rate
from fullstride.meanflow.validate import validate
from fullstride.meanflow.watchdog import gpu_use, limits_of, steps_to_checkpoint, watchdog_of
from fullstride.precision import of_process, set_precision
from fullstride.runlock import release
from fullstride.runlog import write_config
from fullstride.step.torch import ALONE, Processes, joined
from fullstride.stop import Stop


class Trainer:
    """One run: its live objects and its loop; of several processes each has one, and the first alone writes."""

    def __init__(self, config: TrainConfig, processes: Processes = ALONE):
        """Build everything of a run, going on from its newest whole checkpoint if the configuration says so.

        Raises:
            ConfigError: for settings that cannot work here, or a run that would be overwritten.

        """
        validate(config)
        self.config, self.processes = config, processes
        self.device = resolve_device(config.device)
        check_share(config, processes, self.device)
        set_precision(of_process(config.precision, config.loss.jvp_precision), self.device)
        self.data = load_data(config.data)
        self.steps = steps_per_epoch(config, len(self.data.train))
        # Before the run's folder is touched: settings that cannot be must not cost an earlier run.
        check_tracker(config.track)
        check_evaluation(self.data, config.evaluation, due=config.eval_every > 0)
        self.state = build_state(config, self.data, self.device, processes)
        loss = build_loss(config.loss, self.data.num_classes)
        self.update = Update(config, loss, build_inputs(config.data, self.data), self.state, self.total_steps)
        self.loader = Loader(self.data.train, self.device, config.data.workers)
        self.run, checkpoint = processes.led(lambda: open_run(config))
        if checkpoint is not None:
            self.state.restore(checkpoint, config)
        if config.resume and processes.leads:
            start = checkpoint or f"no checkpoint in {self.run} yet, starting at step 0"
            Console().print(f"resume=true: {start}{self._changed_length(checkpoint)}", soft_wrap=True, markup=False)
        self.reporter: Reporter | Silent = Silent()
        if processes.leads:
            write_config(self.run, config)
            self.reporter = Reporter(config, self.run, self.state.position.step, self.total_steps)
        self.evaluator: Evaluator | None = None
        self.limits, self.stop = limits_of(config, self.device), Stop()
        self.gpu_use = gpu_use(self.limits, self.device)
        self.watchdog = watchdog_of(self.limits, self.state, self.run, self.gpu_use)
        self.batches = self._batches()
        self._rollbacks = 0  # since the last checkpoint
        self._going = False  # whether a step was made

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps

    def _changed_length(self, checkpoint: Path | None) -> str:
        """What another number of epochs means for a run that goes on."""
        epochs = self.config.epochs
        if checkpoint is None or (before := read_manifest(checkpoint)["config"]["epochs"]) == epochs:
            return ""
        if self.state.position.epoch >= epochs:
            return f"; epochs={epochs} are made already, nothing to train"
        cosine = self.config.optimizer.decay == "cosine"
        return f"; epochs: {before} -> {epochs}{', to whose end the cosine is stretched' if cosine else ''}"

    def run_to_end(self) -> Path:
        """Train until the last epoch and return the run's folder; a stop signal saves first.

        Raises:
            Preempted: after saving, if SIGTERM came.
            KeyboardInterrupt: after saving, if SIGINT came.
            FloatingPointError: if steps keep being harmful after the last checkpoint was restored.
            OutOfMemory: if a step does not fit; the message says what would. Also if the check of du/dt does not.
            OSError: if the last checkpoint cannot be written.
            ConfigError: if an evaluation is missing something; the run is saved first. Before the first step, if du/dt
                is wrong.

        """
        try:
            with self.loader, self.reporter, self.gpu_use, self.watchdog, self.stop:
                self._expect_checkpoint()
                if self._evaluation_is_missing():
                    self._evaluate()
                while self.state.position.epoch < self.config.epochs:
                    self._epoch()
        except OutOfMemory as error:
            self._tell_out_of_memory(str(error))
            raise
        finally:
            release(self.run)
        return self.run

    def _epoch(self) -> None:
        """The rest of the present epoch, or as much of it as goes before a checkpoint is restored."""
        position = self.state.position
        while position.batch < self.steps:
            metrics = self._next_step() if self._going else self._first_step()
            position.step, position.batch = position.step + 1, position.batch + 1
            self.stop.arm()
            rate = learning_rate(self.config.optimizer, position.step - 1, self.total_steps)
            self.reporter.step(position, metrics, rate, self.state.guard.tensors["skipped"])
            if self.state.guard.exhausted():
                self._roll_back()
                return
            if self._stopped():
                self._end_stopped()
            self._after_step()
        position.epoch, position.batch = position.epoch + 1, 0
        self._after_epoch()

    def _after_step(self) -> None:
        """For those who watch a training: nothing here."""

    def _tell_out_of_memory(self, message: str) -> None:
        step = self.state.position.step
        write_end(self.run, reason="out_of_memory", message=message, step=step, exit_code=OUT_OF_MEMORY)

    def _expect_checkpoint(self) -> None:
        self.watchdog.expect_checkpoint(steps_to_checkpoint(self.config, self.state.position, self.steps))

    def _watch_steps(self) -> None:
        if self._going:
            self.watchdog.train()
        else:
            self.watchdog.wait_for("the first step", self.limits.first_step)

    def _stopped(self) -> bool:
        """Whether a stop signal has come, to whichever process."""
        self.stop.signal = self.processes.largest(self.stop.signal or 0) or None
        return self.stop.signal is not None

    def _first_step(self) -> dict[str, Tensor]:
        """The first of this process, which may start workers and compile for minutes; a signal ends it at once."""
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

    def _next_step(self) -> dict[str, Tensor]:
        return self._step(*self._next_batch())

    def _checked_step(self) -> dict[str, Tensor]:
        batch = self._next_batch()
        if self.config.guard.check_tangents:
            self.watchdog.wait_for("the check of du/dt", self.limits.first_step)
            if report := check_derivative(self.update, self.state, *batch):
                self.reporter.tangents(self.state.position, report)
            self.watchdog.wait_for("the first step", self.limits.first_step)
        return self._step(*batch)

    def _next_batch(self) -> Batch:
        try:
            return next(self.batches)
        except RuntimeError:
            # A scheduler sends SIGTERM to the loader's workers, too, which then end before this process saves.
            if self.stop.signal is None or not self._going or self.processes.size > 1:
                raise
            self._end_stopped()

    def _orders(self) -> Iterator[Tensor]:
        """The order of the records in each epoch from the present one on."""
        config, n = self.config, len(self.data.train)
        attempt = self.state.position.attempt
        for epoch in itertools.count(self.state.position.epoch):
            order = epoch_order(
                n,
                steps=self.steps,
                micro_batches=config.gradient_accumulation_steps,
                batch_size=config.data.batch_size,
                seed=config.seed,
                epoch=epoch,
                attempt=attempt,
            )
            if config.data.hflip and self.data.train.flipped is not None:
                order = mirror_half(order, n, seed=config.seed, epoch=epoch, attempt=attempt)
            yield share_of(order, self.processes)

    def _batches(self) -> Iterator[Batch]:
        """The batches from the present position on, over the borders of epochs."""
        return self.loader.batches(self._orders(), start=self.state.position.batch)

    def _step(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        try:
            return self.update(raw, labels)
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            peak = memory.peak_memory(self.device)
            shape, dtype = raw.shape[2:], raw.dtype
            # The error's traceback holds the step's activations.
            error.__traceback__ = None
        raise self._out_of_memory(peak, shape, dtype)

    def _out_of_memory(self, peak: int, shape: torch.Size, dtype: torch.dtype) -> OutOfMemory:
        self.watchdog.wait_for("a batch that fits", self.limits.first_step)

        def trial(size: int) -> None:
            raw = torch.zeros(1, size, *shape, dtype=dtype, device=self.device)
            self.update.gradients(raw, torch.zeros(1, size, dtype=torch.long, device=self.device))

        batch, accumulation = self.config.data.batch_size, self.config.gradient_accumulation_steps
        count = self.processes.size
        fit = memory.fitting_batch(trial, batch // count, accumulation, self.device)
        fit = fit and replace(fit, batch_size=fit.batch_size * count)
        return OutOfMemory(memory.report(batch, accumulation, peak, fit, self.device))

    def _after_epoch(self) -> None:
        epoch, config = self.state.position.epoch, self.config
        last = epoch == config.epochs
        if last or (config.save_every and epoch % config.save_every == 0):
            self._save(must=last)
            self._expect_checkpoint()
        if self._evaluation_is_due():
            self._evaluate()

    def _evaluation_is_due(self) -> bool:
        epoch, every = self.state.position.epoch, self.config.eval_every
        return bool(every) and epoch > 0 and (epoch == self.config.epochs or epoch % every == 0)

    def _evaluation_is_missing(self) -> bool:
        """Whether the run was stopped between the end of an epoch and its evaluation."""
        position = self.state.position
        if position.batch or not self._evaluation_is_due():
            return False
        return self.processes.led(lambda: not self.reporter.has_evaluation(position.step))

    def _evaluate(self) -> None:
        self.watchdog.wait_for("an evaluation", self.limits.evaluation)
        try:
            # Of several processes each part of the work ends by itself, and all of it if one of them does.
            scores = self._scores() if self.processes.size > 1 else self.stop.unless_stopped(self._scores)
        except Exception as error:
            # The steps since the last checkpoint are good, whatever keeps them from being scored.
            self._save(must=True)
            if not memory.is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in an evaluation at evaluation.batch_size={self.config.evaluation.batch_size}: "
                f"the peak was {memory.peak_memory(self.device) / memory.GIB:.2f} GiB; step "
                f"{self.state.position.step} is saved, go on with resume=true and a smaller one"
            ) from None
        if scores is not None:
            self.reporter.evaluation(self.state.position, scores)
        self._watch_steps()
        if self._stopped():
            self._end_stopped()

    def _scores(self) -> dict[str, dict] | None:
        given = (self.data, self.config.evaluation, self.device)
        if self.processes.size == 1:
            self.evaluator = self.evaluator or Evaluator(*given)
        elif self.evaluator is None:
            self.evaluator = shared_evaluator(*given, self.processes, self.stop.unless_stopped)
        if self.evaluator is None:
            return None
        classes = self.data.num_classes if self.config.model.class_conditional else 0
        with self.state.ema.whole(self.state.ema.first) as model:
            return self.evaluator.meanflow_scores(model, classes)

    def _save(self, *, must: bool) -> Path | None:
        """Write a checkpoint, one to return to; what a full disk refuses is tried again later, unless it must be."""
        if (harmful := self.state.guard.tensors["skipped_in_a_row"].item()) and not must:
            self._note(f"not saved at step {self.state.position.step}: the last {harmful} steps were harmful")
            return None
        try:
            saved = self.state.save(self.run / "checkpoints", self.config)
        except (OSError, PeerError) as error:
            if must:
                raise OSError(f"cannot save step {self.state.position.step} ({error}); {self._kept()}") from error
            self._note(f"not saved at step {self.state.position.step} ({error}); training goes on")
            return None
        if harmful:
            # The good ones before it stay, whatever their number.
            self._note(f"{saved} comes after harmful steps ({harmful} in a row): its weights may not be good")
            return saved
        self.processes.led(lambda: keep_newest(self.run, self.config.keep, saved))
        self._rollbacks = 0
        return saved

    def _note(self, message: str) -> None:
        if self.processes.leads:
            note(message)

    def _kept(self) -> str:
        newest = newest_whole(self.run)
        return f"{newest} is whole: free space and go on with resume=true" if newest else "free space and start again"

    def _end_stopped(self, message: str = "") -> NoReturn:
        message = message or f"stopped; saved {self._save(must=True)}, go on with resume=true"
        raise Preempted(message) if self.stop.signal == signal.SIGTERM else KeyboardInterrupt(message)

    def _roll_back(self) -> None:
        """Return to the newest checkpoint, with other random numbers and another order from there on."""
        step, limit = self.state.position.step, self.config.guard.max_skips
        trouble = f"{limit} steps in a row were harmful (not finite, or a spike) before step {step}"
        advice = "lower optimizer.lr, or set optimizer.grad_clip=1"
        checkpoint = self.processes.led(lambda: newest_whole(self.run, good=True))
        if checkpoint is None:
            raise FloatingPointError(f"{trouble}, and there is no checkpoint to return to; {advice}")
        if self._rollbacks == self.config.guard.max_rollbacks:
            raise FloatingPointError(f"{trouble}, {self._rollbacks} times after {checkpoint}, which is kept; {advice}")
        attempt, self._rollbacks = self.state.position.attempt + 1, self._rollbacks + 1
        self.state.restore(checkpoint, self.config)
        self.processes.led(lambda: remove_later(self.run, checkpoint))  # saved by a stop among the harmful steps
        self.state.position.attempt = attempt
        self.state.reseed(self.config.seed)
        self.state.guard.forget_skips()
        self.batches = self._batches()
        self._expect_checkpoint()
        self.reporter.restored(self.state.position, checkpoint.name, step)
        self._note(f"{trouble}; went back to {checkpoint}, on with other random numbers")


def train(config: TrainConfig) -> Path:
    """Train a run to its end and return its folder; see `Trainer`.

    With `distributed=ddp` or `fsdp` torchrun learns why a process failed, and all that it starts anew go on where they
    were.
    """
    check_launch(config)
    if config.distributed == "none":
        return Trainer(config).run_to_end()
    if (run := record(_train_together)(config)) is None:
        raise SystemExit(0)  # which `record` takes for an end like any other
    return run


def _train_together(config: TrainConfig) -> Path:
    with joined(resolve_device(config.device).type) as processes:
        again = {"resume": True, "overwrite": False} if launched.restarts() else {}
        return Trainer(replace(config, **again), processes).run_to_end()

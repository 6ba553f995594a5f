"""A training run from its first step to its last, through stops, skipped steps, restored checkpoints and full disks."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from fullstride.device.precision import of_process, set_precision
from fullstride.device.select import describe, resolve_device
from fullstride.errors import OutOfMemory, Preempted, ReadError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.config.validation import validate
from fullstride.meanflow.data.ahead import Ahead
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.check_records import check_records
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources.known_files import keep_files, known_files
from fullstride.meanflow.evaluation.preflight import check_evaluation, check_generating
from fullstride.meanflow.training.batch_share import check_launch, check_share
from fullstride.meanflow.training.build import build_inputs, build_loss, build_state, steps_per_epoch
from fullstride.meanflow.training.derivative_check import check_derivative
from fullstride.meanflow.training.epoch_orders import orders
from fullstride.meanflow.training.evaluation_schedule import Evaluations
from fullstride.meanflow.training.null_reporter import Silent
from fullstride.meanflow.training.out_of_memory import step_that_fits
from fullstride.meanflow.training.reporter import Reporter
from fullstride.meanflow.training.saver import Saves
from fullstride.meanflow.training.step import Update, learning_rate, schedule
from fullstride.meanflow.training.trackers import check_tracker
from fullstride.meanflow.training.watchdog import gpu_use, limits_of, steps_to_checkpoint, watchdog_of
from fullstride.process import torchrun as launched
from fullstride.process.exit_codes import OUT_OF_MEMORY, UNREAD
from fullstride.process.signals import Stop
from fullstride.runs.early_ends import write_end
from fullstride.runs.folder import how_to_resume, write_config
from fullstride.runs.lock import release
from fullstride.runs.next_steps import say
from fullstride.step.torch import ALONE, Processes, joined
from fullstride.step.torch.runners.backends import start_compiler
from fullstride.step.torch.schedules import Schedule


class Trainer:
    """One run: its live objects and its loop; of several processes each has one, and the first alone writes."""

    def __init__(self, config: TrainConfig, processes: Processes = ALONE, *, resume_advice: str = ""):
        """Build everything of a run, going on from its newest whole checkpoint if the configuration says so.

        Args:
            config: the run's.
            processes: that train it together.
            resume_advice: what a person has to do to continue a stopped run; see `how_to_resume`, which is the default.

        Raises:
            ConfigError: for settings that cannot work here, or a run that would be overwritten.

        """
        validate(config)
        self.config, self.processes = config, processes
        self.resume_advice = resume_advice or how_to_resume(config)
        self.device = resolve_device(config.device)
        check_share(config, processes, self.device)
        set_precision(of_process(config.precision, config.loss.jvp_precision), self.device)
        start_compiler(config.backend, self.device)  # early, while data are read
        check_holdout(config.data)  # no part of loading, as earlier runs that gave one can be evaluated
        if config.resume and config.data.path:  # it was there: where it is not, its disk may be away
            place = Path(config.data.path).expanduser()
            read_again(place.stat, place.__str__)
        folder = Path(config.output_dir) / config.run_name
        self.data = load_data(config.data, known_files(folder) if config.resume else None)
        if config.data.check:
            processes.led(lambda: check_records(self.data, config.data.workers, config.data.skip_damaged))
        self.steps = steps_per_epoch(config, len(self.data.train))
        # Before the run's folder is touched: settings that cannot be must not cost an earlier run.
        check_tracker(config.track)
        check_evaluation(self.data, config.evaluation, due=config.eval_every > 0)
        if config.eval_every:
            check_generating(config.evaluation, self.device)
        self.state = build_state(config, self.data, self.device, processes)
        loss = build_loss(config.loss, self.data.num_classes, self.state.ema)
        self.update = Update(config, loss, build_inputs(config.data, self.data), self.state, self._rates())
        self.loader = Loader(self.data.train, self.device, config.data.workers)
        self.saves = Saves.opened(config, self.state, self.resume_advice)
        self.run = self.saves.run
        self._turn_page()
        self.reporter: Reporter | Silent = Silent()
        if processes.leads:
            write_config(self.run, config)
            keep_files(self.run, self.data.files)
            made, judged = self.state.position.step, self.state.guard.judged()
            self.reporter = Reporter(config, self.run, made, self.total_steps, judged)
        self.limits = limits_of(config, self.device)
        self.stop = Stop(ended=f"ended without saving; to continue from the last checkpoint, {self.resume_advice}")
        self.evaluations = Evaluations(config, self.data, self.device, self.state, self.reporter, self.stop)
        self.gpu_use = gpu_use(self.limits, self.device)
        self.watchdog = watchdog_of(self.limits, self.state, self.run, self.gpu_use)
        self.batches = self._batches()
        self._going = False  # whether a step was made
        self._overdue = False
        self._failed = False  # whether a process cannot read its next batch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps

    @property
    def description(self) -> str:
        """What is trained on what, for people."""
        config, data = self.config, self.data
        parameters = sum(p.numel() for p in self.state.model.parameters())
        size = "x".join(map(str, data.image_shape))
        batch = config.data.batch_size * config.gradient_accumulation_steps
        epochs = f"{config.epochs:,} epoch{'s' if config.epochs != 1 else ''}"
        return (
            f"training {config.model.name} ({parameters:,} parameters) on {len(data.train):,} "
            f"{'images' if data.pixels else 'latents'} ({size}) of data={data.name}: {epochs}, "
            f"{self.total_steps:,} steps of {batch:,}, on {describe(self.device)}"
        )

    def run_to_end(self) -> Path:
        """Train until the last epoch and return the run's folder; a stop signal saves first.

        Raises:
            Preempted: after saving, if SIGTERM came.
            KeyboardInterrupt: after saving, if SIGINT came.
            FloatingPointError: if steps keep being harmful after the last checkpoint was restored.
            OutOfMemory: if a step does not fit; the message says what would. Also if the check of du/dt does not.
            OSError: if the last checkpoint cannot be written.
            ConfigError: if an evaluation is missing something, or a record is damaged; the run is saved first. Before
                the first step, if du/dt is wrong.
            ReadError: if data cannot be read for now, or a worker has died; the run is saved first.

        """
        try:
            with self.loader, self.reporter, self.gpu_use, self.watchdog, self.stop:
                self._expect_checkpoint()
                if self.evaluations.is_missing():
                    self._evaluate()
                while self.state.position.epoch < self.config.epochs:
                    self._epoch()
        except OutOfMemory as error:
            step = self.state.position.step
            write_end(self.run, reason="out_of_memory", message=str(error), step=step, exit_code=OUT_OF_MEMORY)
            raise
        except ReadError as error:
            step = self.state.position.step
            write_end(self.run, reason="read_error", message=str(error), step=step, exit_code=UNREAD)
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
            self.reporter.step(position, metrics, self._rate(position.step - 1), self.state.guard.judged)
            if self.state.guard.exhausted():
                self._roll_back()
                return
            if not self._is_over():
                # While nothing of a step is under way: all processes can save if one has no batch.
                self.batches.read()
            if self._stopped():
                self._end_stopped()
            if self._failed:
                self._end_unread()
            if self._overdue:
                self._save_early()
            self._after_step()
        self._turn_page()
        self._after_epoch()

    def _rates(self) -> Schedule:
        """Factors of the learning rate, on the device."""
        return schedule(self.config.optimizer, self.total_steps)

    def _rate(self, step: int) -> float:
        """The learning rate of a step, for those who read of it."""
        return learning_rate(self.config.optimizer, step, step / self.total_steps)

    def _turn_page(self) -> None:
        """A run that was stopped at the very end of an epoch, where it was saved, is at the beginning of the next."""
        position = self.state.position
        if position.batch >= self.steps:  # more of a set that has become smaller
            position.epoch, position.batch = position.epoch + 1, 0

    def _after_step(self) -> None:
        """For those who watch a training: nothing here."""

    def _expect_checkpoint(self) -> None:
        self.watchdog.expect_checkpoint(steps_to_checkpoint(self.config, self.state.position, self.steps))

    def _watch_steps(self) -> None:
        if self._going:
            self.watchdog.train()
        else:
            self.watchdog.wait_for("the first step", self.limits.first_step)

    def _stopped(self) -> bool:
        """Agree with the other processes on a stop signal, a batch that cannot be read and an overdue checkpoint.

        Returns:
            Whether a signal came to any.

        """
        # A scheduler's SIGTERM goes to the loader's workers, too, which then end before this process: it comes first.
        unread = self.batches.error is not None
        found = self.processes.largest(4 * (self.stop.signal or 0) + 2 * unread + self.watchdog.checkpoint_overdue)
        self.stop.signal, self._failed, self._overdue = found // 4 or None, bool(found & 2), bool(found & 1)
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
        return self._step(*next(self.batches))

    def _checked_step(self) -> dict[str, Tensor]:
        batch = next(self.batches)
        if self.config.guard.check_tangents:
            self.watchdog.wait_for("the check of du/dt", self.limits.first_step)
            if report := check_derivative(self.update, self.state, *batch):
                self.reporter.tangents(self.state.position, report)
            self.watchdog.wait_for("the first step", self.limits.first_step)
        return self._step(*batch)

    def _is_over(self) -> bool:
        """Tell whether the run's last step is made."""
        position = self.state.position
        return position.batch >= self.steps and position.epoch + 1 == self.config.epochs

    def _batches(self) -> Ahead:
        """The batches from the present position on, over the borders of epochs."""
        position = self.state.position
        order = orders(self.config, self.data.train, self.steps, position, self.processes)
        return Ahead(self.loader.batches(order, start=position.batch))

    def _step(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        search = lambda: self.watchdog.wait_for("a batch that fits", self.limits.first_step)  # noqa: E731
        return step_that_fits(self.update, raw, labels, self.device, search)

    def _after_epoch(self) -> None:
        epoch, config = self.state.position.epoch, self.config
        last = epoch == config.epochs
        if last or (config.save_every and epoch % config.save_every == 0):
            self._save(must=last)
            self._expect_checkpoint()
        if self.evaluations.is_due():
            self._evaluate()

    def _evaluate(self) -> None:
        self.watchdog.wait_for("an evaluation", self.limits.evaluation)
        self.evaluations.make(lambda: self._save(must=True))
        self._watch_steps()
        if self._stopped():
            self._end_stopped()

    def _save(self, *, must: bool) -> Path | None:
        return self.saves.save(must=must)

    def _save_early(self) -> None:
        """Save where the run is: its steps have become much slower, and the next checkpoint is far away."""
        if saved := self._save(must=False):
            self.saves.note(f"steps have become slower; saved early: {saved}")
        self._expect_checkpoint()

    def _end_stopped(self, message: str = "") -> NoReturn:
        message = message or f"stopped; saved {self._save(must=True)}; to continue, {self.resume_advice}"
        raise Preempted(message) if self.stop.signal == signal.SIGTERM else KeyboardInterrupt(message)

    def _end_unread(self) -> NoReturn:
        """Save, then raise why the next batch is not there."""
        error = self.batches.error or ReadError("another process cannot read its data")
        try:
            kept = f"saved {self._save(must=True)}"
        except OSError as failed:
            kept = str(failed)
        raise type(error)(f"{error}; {kept}; to continue, {self.resume_advice}") from None

    def _roll_back(self) -> None:
        before = self.state.position.step
        checkpoint = self.saves.go_back()
        self.batches = self._batches()
        self._expect_checkpoint()
        self.reporter.restored(self.state.position, checkpoint.name, before, self.state.guard.judged())


def train(config: TrainConfig) -> Path:
    """Train a run to its end and return its folder; see `Trainer`.

    With `distributed=ddp` or `fsdp` torchrun learns why a process failed, and all that it starts anew go on where they
    were.
    """
    check_launch(config)
    if config.distributed == "none":
        return _begun(Trainer(config)).run_to_end()
    if (run := record(_train_together)(config)) is None:
        raise SystemExit(0)  # which `record` takes for an end like any other
    return run


def _train_together(config: TrainConfig) -> Path:
    with joined(resolve_device(config.device).type, config.transfers) as processes:
        again = {"resume": True, "overwrite": False} if launched.restarts() else {}
        return _begun(Trainer(replace(config, **again), processes)).run_to_end()


def _begun(trainer: Trainer) -> Trainer:
    """The trainer, of which the first process has said what it trains."""
    if trainer.processes.leads:
        say(trainer.description)
    return trainer

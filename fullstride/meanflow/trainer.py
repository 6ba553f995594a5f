"""The training loop: AdamW, warm-up, average of the weights, accumulation, metrics, exact resume."""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fullstride.device import resolve_device
from fullstride.meanflow.build import build_loss, build_model, build_optimizer, load_data, steps_per_epoch
from fullstride.meanflow.config import OptimizerConfig, TrainConfig
from fullstride.meanflow.ema import Ema
from fullstride.meanflow.evaluate import Evaluator
from fullstride.meanflow.runlog import MetricsLog, open_run, write_config
from fullstride.meanflow.state import Position, RunState
from fullstride.meanflow.validate import validate
from fullstride.precision import autocast, set_precision


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    decay = 0.5 + 0.5 * math.cos(math.pi * step / total) if config.decay == "cosine" else 1.0
    return config.lr * warm * decay


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them, so that the run can save where it is."""
    caught: list[int] = []
    names = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(name, lambda number, _: caught.append(number)) for name in names]
    try:
        yield caught
    finally:
        for name, handler in zip(names, old, strict=True):
            signal.signal(name, handler)


class Trainer:
    """One run: its live objects and its loop."""

    def __init__(self, config: TrainConfig):
        """Build everything of a run, going on from its newest checkpoint if the configuration says so.

        Raises:
            ConfigError: for settings that cannot work here, or a run that would be overwritten.

        """
        validate(config)
        self.config = config
        self.device = resolve_device(config.device)
        set_precision(config.precision, self.device)
        self.data = load_data(config.data.name)
        self.images = self.data.train_images.to(self.device)
        self.labels = self.data.train_labels.to(self.device)
        self.steps = steps_per_epoch(config, len(self.images))
        self.loss = build_loss(config.loss)
        # Before the run's folder is touched: settings that cannot be must not cost an earlier run.
        self.state = self._new_state()
        self.run, checkpoint = open_run(config)
        if checkpoint is not None:
            self.state.restore(checkpoint, config)
        if config.resume:
            Console().print(f"resume=true: {checkpoint or f'no checkpoint in {self.run} yet, starting at step 0'}")
        write_config(self.run, config)
        self.log = MetricsLog(self.run, self.state.position.step)
        self.evaluator: Evaluator | None = None

    def _new_state(self) -> RunState:
        config = self.config
        torch.manual_seed(config.seed)
        model = build_model(config.model, self.data.image_shape, self.data.num_classes).to(self.device)
        generator = torch.Generator(self.device).manual_seed(config.seed)
        ema = Ema(model, config.ema.decay, config.ema.period)
        optimizer = build_optimizer(config.optimizer, model)
        shape, classes = self.data.image_shape, self.data.num_classes
        return RunState(model, ema, optimizer, generator, Position(), shape, classes)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps

    def run_to_end(self) -> Path:
        """Train until the last epoch and return the run's folder; a stop signal saves first.

        Raises:
            KeyboardInterrupt: after saving, if SIGINT or SIGTERM came.
            FloatingPointError: if the loss is not finite; the last checkpoint stays.

        """
        position, config = self.state.position, self.config
        with self._progress() as (progress, task), stop_signals() as stopped:
            while position.epoch < config.epochs:
                for indices in self._batches(position.epoch)[position.batch :]:
                    metrics = self._step(indices)
                    position.step, position.batch = position.step + 1, position.batch + 1
                    progress.update(task, completed=position.step)
                    self._report(metrics, progress, task)
                    if stopped:
                        saved = self._save()
                        raise KeyboardInterrupt(f"stopped; saved {saved}, go on with resume=true")
                position.epoch, position.batch = position.epoch + 1, 0
                self._after_epoch()
        return self.run

    def _progress(self):
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )  # fmt: skip
        task = progress.add_task("training", total=self.total_steps, completed=self.state.position.step, status="")
        self._clock = time.perf_counter(), self.state.position.step

        @contextlib.contextmanager
        def shown():
            with progress:
                yield progress, task

        return shown()

    def _batches(self, epoch: int) -> list[Tensor]:
        """The epoch's optimizer batches, each a list of micro-batches of indices; a function of (seed, epoch) alone."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.images), generator=generator)
        size = self.config.data.batch_size * self.config.gradient_accumulation_steps
        # One copy an epoch: a copy a step would make the host wait for the device each time.
        order = order[: self.steps * size].to(self.device)
        return [chunk.view(-1, self.config.data.batch_size) for chunk in order.split(size)]

    def _step(self, indices: Tensor) -> dict[str, Tensor]:
        """One optimizer step over the micro-batches `indices`; its metrics stay on the device."""
        state, config = self.state, self.config
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, state.position.step, self.total_steps)
        state.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        for chosen in indices:
            label = self.labels[chosen] if config.model.class_conditional else None
            with autocast(config.precision, self.device):
                loss, metrics = self.loss(state.model, self.images[chosen], label, generator=state.generator)
            (loss / len(indices)).backward()
            for key, value in {"loss": loss.detach(), **metrics}.items():
                total[key] = total.get(key, 0) + value / len(indices)
        if config.optimizer.grad_clip > 0:
            parameters = state.model.parameters()
            total["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.grad_clip)
        state.optimizer.step()
        state.ema.update(state.position.step + 1)
        return total

    def _report(self, metrics: dict[str, Tensor], progress: Progress, task: Any) -> None:
        """Every `log_every` steps, and at the last: the only place where the host waits for the device."""
        position = self.state.position
        if position.step % self.config.log_every and position.step != self.total_steps:
            return
        values = {key: value.item() for key, value in metrics.items()}
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss is {values['loss']} at step {position.step}; lower optimizer.lr, or set "
                "optimizer.grad_clip=1; the last checkpoint is untouched"
            )
        now, (before, step) = time.perf_counter(), self._clock
        self._clock = now, position.step
        config = self.config
        batch = config.data.batch_size * config.gradient_accumulation_steps
        values["images_per_second"] = (position.step - step) * batch / (now - before)
        values["lr"] = learning_rate(config.optimizer, position.step - 1, self.total_steps)
        self.log.write(position.step, epoch=position.epoch, images=position.step * batch, **values)
        progress.update(task, status=f"squared error {values['squared_error']:.4f}")

    def _after_epoch(self) -> None:
        epoch, config = self.state.position.epoch, self.config
        last = epoch == config.epochs
        if last or (config.save_every and epoch % config.save_every == 0):
            self._save()
        if config.eval_every and (last or epoch % config.eval_every == 0):
            self.evaluator = self.evaluator or Evaluator(self.data, config.evaluation, self.device)
            classes = self.data.num_classes if config.model.class_conditional else 0
            scores = self.evaluator.meanflow_scores(self.state.ema.model, classes)
            self.log.write(self.state.position.step, epoch=epoch, evaluation=scores)

    def _save(self) -> Path:
        return self.state.save(self.run / "checkpoints", self.config)


def train(config: TrainConfig) -> Path:
    """Train a run to its end and return its folder; see `Trainer`."""
    return Trainer(config).run_to_end()

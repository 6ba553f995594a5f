"""A training run from its first step to its last, through stops and resumptions."""

import json
import signal
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from fullstride.bert.data.stream import prefetched
from fullstride.bert.data.tokenizer import FILE, save_tokenizer
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.weights import shapes_of
from fullstride.bert.training.build import attention_of, begin, data_for, evaluator_of, model_of, step_of
from fullstride.bert.training.optimizer import updates
from fullstride.bert.training.reporter import Reporter
from fullstride.bert.training.runs import (
    CHECKPOINTS,
    HEADS,
    SIZES,
    begun_run,
    own_sizes,
    refuse_other_recipe,
)
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError, OutOfMemory, Preempted, is_out_of_memory, one_line
from fullstride.process.signals import StopSignal
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.folder import has_evaluation, how_to_resume, open_folder, write_config
from fullstride.runs.lock import release
from fullstride.runs.state import record_state
from fullstride.step.jax import Metrics
from fullstride.step.jax.checkpoint import Checkpoints
from fullstride.step.jax.state import State

# Steps that may wait on the device behind the one that runs: it never idles, and a stop is obeyed soon.
WAITING = 2


class Trainer:
    """One run: its live objects and its loop."""

    def __init__(self, settings: TrainSettings, console: Console | None = None, *, resume_advice: str = ""):
        """Build everything of a run, going on from its newest checkpoint if the settings say so.

        Args:
            settings: the run's settings.
            console: console for its reports.
            resume_advice: instructions for a person to continue a stopped run; `how_to_resume` by default.

        Raises:
            ConfigError: for settings that cannot work here, a run that would be overwritten, or one that would go on
                with another recipe.

        """
        begin(settings)
        refuse_other_recipe(settings)
        self.settings, self.console, data = settings, console or Console(), settings.data
        own = begun_run(settings)
        sizes = own_sizes(own)
        # Without a checkpoint there is nothing to go on with, and what the run began with does not count.
        tokenizer = own / FILE if own is not None and sizes is not None and (own / FILE).is_file() else None
        self.data, self.batches = data_for(settings, tokenizer)
        model = model_of(settings.model, self.data.train.vocabulary, data.length, settings.seed, sizes)
        attention = attention_of(
            model.config, settings.precision, data.length if data.pack or model.config.modern else 0
        )
        # Of shapes: a step keeps the model it is made of, and the weights of the start would stay on the device.
        self.step = step_of(settings, shapes_of(model.config))
        self.evaluator = evaluator_of(settings, self.data.held_out)
        self._key = jax.random.fold_in(jax.random.key(settings.seed, impl=settings.rng), 1)
        # Last, so that settings that cannot be cost no earlier run.
        self.run = open_folder(settings)
        self.checkpoints = Checkpoints(self.run / CHECKPOINTS, settings.keep or None)
        self.state = self._start(model)
        save_tokenizer(self.data.tokenizer, self.run)
        replace_file(self.run / SIZES, json.dumps(asdict(model.config), indent=1) + "\n")
        write_config(self.run, settings)
        skipped = self.state.step - updates(self.state.opt_state) if settings.precision == "fp16" else 0
        self.reporter = Reporter(settings, self.run, self.step, self.state.step, self.console, skipped)
        self.resume_advice = resume_advice or how_to_resume(settings)
        self.stop = StopSignal(
            ended=f"ended without saving; to continue from the last checkpoint, {self.resume_advice}"
        )
        self._sent = deque[Metrics]()
        self._say(self._described(model, attention))

    def _start(self, model: Bert) -> State:
        """The state of the newest checkpoint, or the first one of a model."""
        if not self.settings.resume:
            return self._first(model)
        if not self.checkpoints.numbers():
            self._say(f"resume=true: no checkpoint in {self.run} yet, starting at step 0")
            return self._first(model)
        state, extra = self.checkpoints.restore(self.step)
        if extra["data"] != self.data.fingerprint:
            raise ConfigError(
                f"{self.run}: the texts of data={self.settings.data.name} changed since the run began; restore them, "
                "or choose another run_name"
            )
        self._say(f"resume=true: continuing from step {state.step} of {self.run}")
        return state

    def _first(self, model: Bert) -> State:
        """The state before the first step; heads of a fine-tune go into the run's folder."""
        (self.run / HEADS).unlink(missing_ok=True)
        if model.heads is not None:
            replace_file(self.run / HEADS, model.heads.stored)
        return self.step.init(model.with_heads(None))

    def _described(self, model: Any, attention: str) -> str:
        count = sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
        rows, data = self.data.train, self.settings.data
        return (
            f"{jax.devices()[0].device_kind}: {count / 1e6:.1f}M weights, attention by {attention}; "
            f"{rows.count():,} tokens of {data.name} in "
            f"{len(rows):,} rows of {data.length}, {rows.count() / rows.tokens.size:.0%} full; "
            f"{data.batch_size * self.settings.steps / len(rows):.1f} epochs"
        )

    def run_to_end(self) -> Path:
        """Train until the last step and return the run's folder; a stop signal saves first.

        Raises:
            Preempted: after saving, if SIGTERM came.
            KeyboardInterrupt: after saving, if SIGINT came.
            FloatingPointError: if a loss is not finite.
            OutOfMemory: if a step or an evaluation does not fit.

        """
        settings = self.settings
        try:
            recorded = record_state(self.run, steps=settings.steps, made=lambda: self.state.step)
            with recorded, self.stop, self.checkpoints, self.reporter:
                self._steps(self.state.step)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            data = settings.data
            raise OutOfMemory(
                f"{data.batch_size // settings.accumulate} rows of {data.length} tokens at once do not fit "
                f"({one_line(error)[:200]}); raise accumulate={settings.accumulate}, lower data.batch_size or "
                f"evaluation.batch_size={settings.evaluation.batch_size}, or use precision=bf16"
            ) from None
        finally:
            release(self.run)
        return self.run

    def _steps(self, first: int) -> None:
        if self._is_due(first, self.settings.eval_every) and not has_evaluation(self.run, first):
            self._evaluate()
        with prefetched(self._given, first, self.settings.steps) as given:
            for batch, key in given:
                self.state, late = self.step(self.state, batch, key)
                self.stop.arm()
                self.reporter.late(late)
                self._sent.append(late)
                if len(self._sent) > WAITING and (oldest := self._sent.popleft()):
                    oldest.arrays["loss"].block_until_ready()
                self._after_step()

    def _given(self, number: int) -> tuple[Any, Any]:
        """Put a step's batch on the device; runs on a thread of its own."""
        batch, sharding = self.batches.at(number), self.step.sharding
        placed = jax.device_put(batch) if sharding is None else sharding.put(batch)
        return placed, jax.random.fold_in(self._key, number)

    def _is_due(self, number: int, every: int) -> bool:
        return bool(every) and number > 0 and (number % every == 0 or number == self.settings.steps)

    def _after_step(self) -> None:
        number, settings = self.state.step, self.settings
        if self.stop.signal is not None:
            self._end_stopped()
        if number == settings.steps or self._is_due(number, settings.save_every):
            self._save()
        if self._is_due(number, settings.eval_every):
            self._evaluate()

    def _save(self) -> None:
        """Write a checkpoint; metrics up to here are reported first, since a resumed run would lack them."""
        self.reporter.late(self.step.finish())
        if self.state.step not in self.checkpoints.numbers():
            self.checkpoints.save(self.state, {"data": self.data.fingerprint, "settings": asdict(self.settings)})

    def _evaluate(self) -> None:
        scores = self.stop.unless_stopped(lambda: self.evaluator(self.state.ema_model or self.state.model))
        if scores is not None:
            self.reporter.evaluation(self.state.step, scores)
        if self.stop.signal is not None:
            self._end_stopped()

    def _end_stopped(self) -> NoReturn:
        self._save()
        self.checkpoints.wait()
        message = f"stopped; saved step {self.state.step} in {self.run}; to continue, {self.resume_advice}"
        raise Preempted(message) if self.stop.signal == signal.SIGTERM else KeyboardInterrupt(message)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def train(settings: TrainSettings) -> Path:
    """Train a run to its end and return its folder; see `Trainer`."""
    return Trainer(settings).run_to_end()

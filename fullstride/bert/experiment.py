"""Masked language modelling on real text for so many minutes: what is learned, and what calling the step costs."""

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fullstride.bench.code import joined
from fullstride.bench.session import Budget, say
from fullstride.bert.bench_workload import flops
from fullstride.bert.build import model_of
from fullstride.bert.loss import mlm_loss
from fullstride.bert.optimizer import optimizer_of
from fullstride.bert.overrides import settings_of
from fullstride.bert.settings import TrainSettings
from fullstride.bert.trainer import Trainer
from fullstride.errors import ConfigError, one_of
from fullstride.files import replace_file
from fullstride.step.jax.bench_real import over, step_times
from fullstride.step.jax.bench_workload import Workload
from fullstride.step.jax.precision import precision_of

MODELS: Mapping[str, tuple[str, ...]] = {"gpu": ("base6", "base"), "cpu": ("tiny", "mini"), "smoke": ("tiny",)}
OURS, BESIDE = "TrainStep grouped", "filter_jit"
WAYS = ("bare executable", OURS, BESIDE)
OVERHEAD = "overhead.json"
# Of the minutes, for evaluations, which take no part in the steps' time.
SPARE = 0.05
# Seconds, on top of the minutes, after which no way is compiled or timed any more; rounds that there are at least.
TIMED, ROUNDS = 150.0, 5
SETTINGS: Mapping[str, str] = {
    "data": "gcide",
    "data.tokenizer": "",
    "data.vocab_size": "8192",
    "data.length": "128",
    "data.batch_size": "256",
    "optimizer.lr": "4e-4",
    "optimizer.warmup_steps": "1000",
    "precision": "bf16",
    "rng": "rbg",
    "log_every": "50",
    "evaluation.size": "200000",
    "device": "gpu",
}
SCALES: Mapping[str, Mapping[str, str]] = {
    "gpu": {},
    # The defaults of `fullstride bert train`.
    "cpu": {
        "data": "python_docs",
        "data.vocab_size": "4096",
        "data.length": "64",
        "data.batch_size": "32",
        "optimizer.lr": "2e-3",
        "optimizer.warmup_steps": "100",
        "precision": "fp32",
        "evaluation.size": "50000",
        "device": "cpu",
    },
    "smoke": {
        "data": "python_docs",
        "data.vocab_size": "512",
        "data.length": "24",
        "data.batch_size": "4",
        "optimizer.warmup_steps": "2",
        "precision": "fp32",
        "log_every": "1",
        "evaluation.size": "2000",
        "device": "cpu",
    },
}
EVALUATIONS = 10
# Steps of a run before it is known how many fit; nothing that is timed depends on them.
NOMINAL = 100_000


@dataclass(frozen=True)
class Asked:
    """What a call is about.

    Attributes:
        scale: gpu, cpu or smoke.
        models: sizes' names; the scale's own if none.
        minutes: of training, for each.
        seed: of weights, order and masks.
        runs: the folder of runs.
        overrides: of the settings.

    """

    scale: str = "gpu"
    models: tuple[str, ...] = ()
    minutes: float = 20.0
    seed: int = 0
    runs: Path = Path("runs/bert-experiment")
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the scale, and take its models.

        Raises:
            ConfigError: for an unknown scale.

        """
        one_of("--scale", self.scale, SCALES)
        object.__setattr__(self, "models", self.models or MODELS[self.scale])

    def settings(self, model: str, steps: int) -> TrainSettings:
        """Of a run of so many steps.

        Raises:
            ConfigError: for a setting that cannot be.

        """
        given = {key: value for key, _, value in (override.partition("=") for override in self.overrides)}
        often = str(-(-steps // EVALUATIONS))
        own = {"steps": str(steps), "eval_every": often, "save_every": often}
        place = {
            "model": model,
            "seed": str(self.seed),
            "output_dir": str(self.runs / self.scale),
            "run_name": f"{model}-{self.seed}",
            "resume": "true",
        }
        merged = {**SETTINGS, **SCALES[self.scale], **own, **given, **place}
        return settings_of([f"{key}={value}" for key, value in merged.items()])

    def run(self, model: str) -> Path:
        """The folder of a run."""
        return self.runs / self.scale / f"{model}-{self.seed}"


class LimitedTrainer(Trainer):
    """A trainer that stops itself, as a signal would stop it."""

    until = float("inf")

    def _after_step(self) -> None:
        if time.monotonic() > self.until and self.stop.signal is None:
            self.stop.signal = signal.SIGTERM
        super()._after_step()


def run(model: str, asked: Asked, until: float = float("inf")) -> None:
    """Time the step, then train as many as fit the minutes, or go on.

    Args:
        model: a size's name.
        asked: the rest.
        until: by the monotonic clock, when to save and leave.

    Raises:
        ConfigError: for settings that cannot work here.
        Preempted: after saving, when the time is over.

    """
    path = asked.run(model) / OVERHEAD
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(overhead(model, asked), indent=1) + "\n")
    begun = json.loads(path.read_text())
    # A later process may go on by other code.
    replace_file(path, json.dumps(begun | {"code": joined([begun.get("code", {})])}, indent=1) + "\n")
    trainer = LimitedTrainer(asked.settings(model, begun["steps"]))
    trainer.until = until
    trainer.run_to_end()


def overhead(model: str, asked: Asked) -> dict[str, Any]:
    """Times of the step's ways in milliseconds, and how many steps of ours fit the minutes."""
    workload, precision = _workload(model, asked), asked.settings(model, NOMINAL).precision
    times = step_times(workload, WAYS, precision, Budget.of(TIMED), ROUNDS)
    if OURS not in times:
        raise ConfigError(f"{model}: compiling took more than {TIMED:g} s, so {OURS} was not timed; try it again")
    bare = times[WAYS[0]]
    ways = {
        name: {
            "step ms": t.free.median_ms,
            "step ms, each waited for": t.blocked.median_ms,
            "over the bare executable": over(t.free.samples_ms, bare.free.samples_ms)["ratio"],
            "first call s": t.free.first_ms / 1e3,
        }
        for name, t in times.items()
    }
    fit = int(60e3 * asked.minutes * (1 - SPARE) / ways[OURS]["step ms"])
    steps = max(fit, asked.settings(model, NOMINAL).optimizer.warmup_steps + 1)
    say(f"{model}: {ways[OURS]['step ms']:.2f} ms a step, {steps} steps")
    return {"steps": steps, "minutes": asked.minutes, "ways": ways}


def _workload(model: str, asked: Asked) -> Workload:
    """The very step of the run, on its first batch."""
    settings = asked.settings(model, NOMINAL)
    settings.run_name = f"{settings.run_name}-overhead"
    settings.overwrite, settings.resume = True, False
    trainer = Trainer(settings)
    vocabulary, data, numbers = trainer.data.train.vocabulary, settings.data, precision_of(settings.precision)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return mlm_loss(numbers.cast(model), batch, key)[0]

    def fresh() -> Any:
        return model_of(settings.model, vocabulary, data.length, settings.seed)

    return Workload(
        name=f"{model}, {settings.precision}, {data.batch_size} x {data.length}",
        model=fresh,
        loss_fn=loss_fn,
        optimizer=optimizer_of(settings.optimizer, settings.steps),
        batch=jax.device_put(trainer.batches.at(0)),
        key=jax.random.key(1, impl=settings.rng),
        flops=flops(fresh().config, data.batch_size, data.length),
    )

"""Masked language modelling on real text for so many minutes: what is learned, and what calling the step costs."""

import json
import signal
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fullstride.bench.environment import environment
from fullstride.bench.experiments import Curve, ExperimentResult, Outcome, PartResult
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
from fullstride.runlog import read_metrics
from fullstride.step.jax.bench_real import over, step_times
from fullstride.step.jax.bench_workload import Workload
from fullstride.step.jax.precision import precision_of

MODELS = ("base6", "base")
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
ABOUT = (
    "Masked language modelling by the ordinary trainer, TrainStep with grouped buffers. The number of steps is what "
    "fits the minutes at the pace measured beforehand, so that the learning rate falls to zero at the end. Before "
    "training, the same step on the first batch is timed through eqx.filter_jit and through the bare executable in the "
    "same process, in turns."
)


@dataclass(frozen=True)
class Asked:
    """What a call is about.

    Attributes:
        scale: gpu or smoke.
        models: sizes' names.
        minutes: of training, for each.
        limit: seconds after which this process saves and leaves.
        seed: of weights, order and masks.
        runs: the folder of runs.
        overrides: of the settings.

    """

    scale: str = "gpu"
    models: tuple[str, ...] = MODELS
    minutes: float = 20.0
    limit: float = 86_400.0
    seed: int = 0
    runs: Path = Path("runs/bert-experiment")
    overrides: tuple[str, ...] = ()

    def settings(self, model: str, steps: int) -> TrainSettings:
        """Of a run of so many steps.

        Raises:
            ConfigError: for a setting that cannot be.

        """
        one_of("--scale", self.scale, SCALES)
        given = {key: value for key, _, value in (override.partition("=") for override in self.overrides)}
        often = str(max(1, steps // EVALUATIONS))
        own = {
            "model": model,
            "seed": str(self.seed),
            "steps": str(steps),
            "eval_every": often,
            "save_every": often,
            "output_dir": str(self.runs / self.scale),
            "run_name": f"{model}-{self.seed}",
            "resume": "true",
        }
        merged = {**SETTINGS, **SCALES[self.scale], **own, **given}
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


def run(model: str, asked: Asked) -> None:
    """Time the step, then train as many as fit the minutes, or go on.

    Raises:
        ConfigError: for settings that cannot work here.
        Preempted: after saving, when `asked.limit` is over.

    """
    start = time.monotonic()
    path = asked.run(model) / OVERHEAD
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(overhead(model, asked), indent=1) + "\n")
    steps = json.loads(path.read_text())["steps"]
    trainer = LimitedTrainer(asked.settings(model, steps))
    trainer.until = start + asked.limit
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


def gather(asked: Asked) -> ExperimentResult:
    """The result of all runs that have begun.

    Raises:
        ConfigError: if none has, or for an unknown scale.

    """
    one_of("--scale", asked.scale, SCALES)
    begun = [model for model in asked.models if (asked.run(model) / "metrics.jsonl").is_file()]
    if not begun:
        raise ConfigError(f"{asked.runs / asked.scale}: no run of {', '.join(asked.models)} there; train one first")
    found = {model: read_metrics(asked.run(model)) for model in begun}
    timed = {model: json.loads((asked.run(model) / OVERHEAD).read_text()) for model in begun}
    settings = asked.settings(begun[0], NOMINAL)
    missing = [f"{model}: not begun" for model in asked.models if model not in begun]
    missing += [
        f"{model}: {_last(found[model])['step']} of {timed[model]['steps']} steps"
        for model in begun
        if _last(found[model])["step"] < timed[model]["steps"]
    ]
    rows = [_learned(model, found[model], asked.seed) for model in begun]
    ways = [
        Outcome({"model": model, "way": way}, {name: {asked.seed: x} for name, x in values.items()}, [model])
        for model in begun
        for way, values in timed[model]["ways"].items()
    ]
    return ExperimentResult(
        "bert",
        "BERT on real text",
        ABOUT,
        asked.scale,
        "cuda" if settings.device == "gpu" else "cpu",
        {
            "minutes": timed[begun[0]]["minutes"],
            "data": settings.data.name,
            "tokens a step": settings.data.batch_size * settings.data.length,
            "precision": settings.precision,
            "overrides": list(asked.overrides),
        },
        [
            PartResult("learned", "What was learned", "How well are held-out entries predicted at the end?", rows),
            PartResult("overhead", "The step by the way it is called", "What does calling the step add to it?", ways),
        ],
        environment(),
        curves=_curves(found),
        missing=missing,
    )


def _last(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return [line for line in lines if "loss" in line][-1]


def _learned(model: str, lines: list[dict[str, Any]], seed: int) -> Outcome:
    last, logged = _last(lines), [line for line in lines if "loss" in line]
    values = {
        "steps": last["step"],
        "minutes of steps": _minutes(logged)[-1],
        "tokens/s": statistics.median(line["tokens_per_second"] for line in logged),
        "training loss": last["loss"],
        "host ms": statistics.median(line["host_ms"] for line in logged),
    }
    if scored := [line["evaluation"] for line in lines if "evaluation" in line]:
        names = {"held-out masked loss": "masked_loss", "accuracy": "masked_accuracy", "bits/byte": "bits_per_byte"}
        values |= {text: scored[-1][name] for text, name in names.items()}
    return Outcome({"model": model}, {name: {seed: float(value)} for name, value in values.items()}, [model])


def _minutes(logged: list[dict[str, Any]]) -> list[float]:
    """Minutes of steps until each line."""
    total, before, minutes = 0.0, 0, []
    for line in logged:
        total += line["seconds_per_step"] * (line["step"] - before)
        before = line["step"]
        minutes.append(total / 60)
    return minutes


def _curves(found: dict[str, list[dict[str, Any]]]) -> list[Curve]:
    loss: dict[str, list[tuple[float, float]]] = {}
    bits: dict[str, list[tuple[float, float]]] = {}
    for model, lines in found.items():
        logged = [line for line in lines if "loss" in line]
        at = dict(zip((line["step"] for line in logged), _minutes(logged), strict=True))
        loss[model] = [(at[line["step"]], line["loss"]) for line in logged]
        bits[model] = [
            (at[line["step"]], line["evaluation"]["bits_per_byte"])
            for line in lines
            if "evaluation" in line and line["step"] in at
        ]
    training = "Training loss, means over the steps between two lines of the log, by minutes of steps."
    held_out = "Bits per byte of held-out entries (pseudo-log-likelihood), by minutes of steps."
    curves = [Curve("loss", training, "minutes of steps", "loss in nats", loss, log_y=False)]
    scored = {model: points for model, points in bits.items() if points}
    if scored:
        curves.append(Curve("bits", held_out, "minutes of steps", "bits a byte", scored, log_y=False))
    return curves

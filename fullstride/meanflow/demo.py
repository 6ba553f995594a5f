"""The demonstration: train on real digits on a CPU in minutes, then compare one step with ODE solvers."""

import json
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.config.schema import (
    DataConfig,
    EmaConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.evaluation.evaluator import Evaluator, evaluations, score_samplers
from fullstride.meanflow.evaluation.scores import SamplerScore, one_step_ratio, score_tables
from fullstride.meanflow.sampling.generate import Generator, load_generator
from fullstride.meanflow.sampling.grids import save_comparison, save_loss_curve
from fullstride.meanflow.sampling.samplers import sample
from fullstride.meanflow.training.state import changed_settings
from fullstride.meanflow.training.trainer import Trainer
from fullstride.measure.environment import environment
from fullstride.process.signals import run_or_stop
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.folder import SAME_COMMAND, check_kind, numbered, read_metrics, run_config
from fullstride.runs.next_steps import command, say, show_next_steps

EPOCHS = 118
SAMPLERS = [("meanflow", 1), ("meanflow", 2), ("meanflow", 4)]
SAMPLERS += [("euler", 10), ("euler", 50), ("euler", 100), ("rk4", 10), ("rk4", 50)]
METRICS = "metrics.json"  # written last: a run that has it is finished
SHOWN = 10  # images of each class in samples.png
# Measured on two otherwise idle cores of an AMD EPYC.
SECONDS_A_STEP = 0.097
SECONDS_AN_EVALUATION = 0.17  # of the network, of all samples


def demo_config(out: Path, epochs: int, seed: int) -> TrainConfig:
    """The recipe, chosen on the training half alone.

    One step crosses from t = 1 to r = 0, so that corner must be sampled: t and r follow laws of their own, r's near 0.
    When both follow logit-normal(-0.4, 1), one step is many times worse than the solver. An image as the output, and
    Muon instead of AdamW, bring one step nearer to the solver.
    """
    return TrainConfig(
        data=DataConfig("digits", batch_size=64),
        model=MODELS["unet_tiny"](class_conditional=True, time_max_frequency=16.0, prediction="x"),
        loss=LossConfig(
            meanflow_ratio=0.65,
            time_law="v1",
            logit_normal_mean=0.0,
            logit_normal_std=1.6,
            r_logit_normal_mean=-4.0,
            r_logit_normal_std=1.6,
            weighting_power=0.5,
            weighting_eps=1e-3,
        ),
        optimizer=OptimizerConfig("muon", lr=3e-3, warmup_steps=100, decay="cosine"),
        ema=EmaConfig([0.999]),
        epochs=epochs,
        log_every=5,
        device="cpu",
        seed=seed,
        run_name=out.name,
        output_dir=str(out.parent),
        overwrite=True,
    )


def run_demo(out: Path, *, epochs: int | None = None, seed: int = 0) -> None:
    """Train, print the table, and leave samples.png, loss.png, metrics.json and a checkpoint in `out`.

    An unfinished demo with the same settings is continued, any other is replaced; a line says which.

    Raises:
        ConfigError: if `out` holds files that are not an earlier demo.
        Preempted, KeyboardInterrupt: if SIGTERM or SIGINT came; the same call continues.

    """
    start = time.perf_counter()
    config = _continued_or_replaced(out, demo_config(out, EPOCHS if epochs is None else epochs, seed))
    trainer = Trainer(config, resume_advice=SAME_COMMAND)
    say(trainer.description)
    steps = trainer.total_steps - trainer.state.position.step
    training = f"{minutes(SECONDS_A_STEP * steps)} of training and " if steps else ""
    scoring = minutes(SECONDS_AN_EVALUATION * sum(evaluations(*row) for row in SAMPLERS))
    samplers = f"{scoring} of scoring {len(SAMPLERS)} samplers"
    say(f"expected: about {training}{samplers}, on two CPU cores that do nothing else")
    trainer.run_to_end()
    generator = load_generator(out, "cpu")
    evaluator, scores = run_or_stop(lambda: _scores(trainer.data, generator), "scoring the samplers")
    _draw(out, generator, trainer.data)
    ratio, trained = one_step_ratio(scores), training_seconds(read_metrics(out))
    metrics = {
        "one_step_over_best_solver": ratio,
        "training_seconds": trained,
        "steps": trainer.state.position.step,
        "floor": asdict(evaluator.floor),
        "samplers": {s.name: asdict(s) for s in scores},
        "config": asdict(trainer.config),
        "environment": environment(),
    }
    replace_file(out / METRICS, json.dumps(metrics, indent=1) + "\n")
    for table in score_tables(scores, evaluator.floor, "Digits"):
        Console().print(table)
    say(f"one-step energy distance / best solver's: {ratio:.2f}")
    say(f"trained for {trained:.0f} s; this command took {time.perf_counter() - start:.0f} s")
    show_next_steps(
        {
            out / "samples.png": "samples of one step, and real digits",
            out / "loss.png": "the training loss",
            out / METRICS: "every number above",
            checkpoints(out)[-1]: "the trained network",
        },
        {
            command("meanflow", "sample", out): "generate more digits",
            command(
                "meanflow", "train", "data=image_folder", "data.path=PICTURES", "data.image_size=32"
            ): "your own data",
        },
    )


def _continued_or_replaced(out: Path, config: TrainConfig) -> TrainConfig:
    """The configuration of this run; prints whether an earlier one is continued or replaced."""
    if not (saved := run_config(out)):
        return config
    check_kind(out, "meanflow")
    finished, changed = (out / METRICS).is_file(), changed_settings(saved, asdict(config))
    if changed.keys() - {"seed"} and not finished:
        named = ", ".join(f"{key}: {values}" for key, values in changed.items())
        raise ConfigError(
            f"{out} holds a run that is not a demo ({named}); expected a demo's folder or no folder; give another "
            "--out, or delete it"
        )
    if not finished and not changed and saved["epochs"] == config.epochs:
        say(f"{out} holds an unfinished demo with the same settings; continuing it")
        return replace(config, resume=True, overwrite=False)
    kind = "a finished" if finished else "an unfinished"
    newest = "".join(f", {path.name}" for path in checkpoints(out)[-1:])
    say(f"{out} holds {kind} demo (epochs={saved['epochs']}, seed={saved['seed']}{newest}); replacing it")
    return config


def minutes(seconds: float) -> str:
    """A duration for people, to half a minute."""
    halves = max(1, round(seconds / 30))
    return "a minute" if halves == 2 else "half a minute" if halves == 1 else f"{halves / 2:g} minutes"


def training_seconds(lines: list[dict[str, Any]]) -> float:
    """Seconds of all steps by the lines of metrics.jsonl, which are those of every process that continued the run."""
    timed = [(line["step"], line["seconds_per_step"]) for line in lines if "seconds_per_step" in line]
    return sum(((step - before) * each for (before, _), (step, each) in pairwise([(0, 0.0), *timed])), start=0.0)


def _scores(data: Dataset, generator: Generator) -> tuple[Evaluator, list[SamplerScore]]:
    say("scoring: preparing the classifier and the reference")
    evaluator = Evaluator(data, generator.config.evaluation, generator.device)
    say(f"scoring: {len(SAMPLERS)} samplers, {evaluator.num} samples each, against the held-out images")
    return evaluator, score_samplers(evaluator, generator.model, SAMPLERS, generator.num_classes)


def _draw(out: Path, generator: Generator, data: Dataset) -> None:
    """Samples next to held-out images, a row for each class in both; the loss."""
    labels = torch.arange(data.num_classes).repeat_interleave(SHOWN)
    real = torch.cat([(data.test.labels == c).nonzero()[:SHOWN, 0] for c in range(data.num_classes)])
    result = sample(
        generator.model,
        sampler="meanflow",
        steps=1,
        num=len(labels),
        shape=generator.image_shape,
        seed=1,
        label=labels if generator.num_classes else None,
        num_classes=generator.num_classes,
        device=generator.device,
    )
    save_comparison(
        result.images,
        data.images(data.test, real),
        out / "samples.png",
        titles=("One step (1 network evaluation)", "Real digits (held out)"),
        row_captions=[str(c) for c in range(data.num_classes)],
    )
    lines = numbered(read_metrics(out), "squared_error")
    save_loss_curve([x["step"] for x in lines], [x["squared_error"] for x in lines], out / "loss.png")

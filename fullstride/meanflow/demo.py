"""The demonstration: train on real digits on a CPU in minutes, then one step beside the solvers of the same weights."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from fullstride.bench.environment import environment
from fullstride.meanflow.config import (
    DataConfig,
    EmaConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)
from fullstride.meanflow.evaluate import Evaluator
from fullstride.meanflow.grids import save_comparison, save_loss_curve
from fullstride.meanflow.presets import MODELS
from fullstride.meanflow.samplers import sample
from fullstride.meanflow.sampling import load_generator
from fullstride.meanflow.scores import SamplerScore, one_step_ratio, score_tables
from fullstride.meanflow.trainer import Trainer
from fullstride.runlog import numbered, read_metrics

EPOCHS = 130
SAMPLERS = [("meanflow", 1), ("meanflow", 2), ("meanflow", 4)]
SAMPLERS += [("euler", 10), ("euler", 50), ("euler", 100), ("rk4", 10), ("rk4", 50)]


def demo_config(out: Path, epochs: int, seed: int) -> TrainConfig:
    """The recipe, chosen on the training half alone.

    One step crosses from t = 1 to r = 0, so that corner must be sampled: t and r follow laws of their own, r's near 0.
    When both follow logit-normal(-0.4, 1), one step is many times worse than the solver.
    """
    return TrainConfig(
        data=DataConfig("digits", batch_size=64),
        model=MODELS["unet_tiny"](class_conditional=True, time_max_frequency=16.0),
        loss=LossConfig(
            meanflow_ratio=0.75,
            time_law="v1",
            logit_normal_mean=-0.6,
            logit_normal_std=1.6,
            r_logit_normal_mean=-4.0,
            r_logit_normal_std=1.6,
            weighting_power=0.75,
            weighting_eps=1e-3,
        ),
        optimizer=OptimizerConfig(lr=1.5e-3, warmup_steps=100, decay="cosine"),
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

    Raises:
        ConfigError: if `out` holds files that are not an earlier run.

    """
    console, start = Console(), time.perf_counter()
    trainer = Trainer(demo_config(out, EPOCHS if epochs is None else epochs, seed))
    trainer.run_to_end()
    trained = time.perf_counter() - start
    generator = load_generator(out, "cpu")
    evaluator = Evaluator(trainer.data, generator.config.evaluation, generator.device)
    found = (evaluator.sampler_score(generator.model, *row, generator.num_classes) for row in SAMPLERS)
    scores = [score for score in found if score is not None]
    _draw(out, generator, trainer.data.images(trainer.data.test, torch.arange(100)))
    ratio = one_step_ratio(scores)
    summary = {"one_step_over_best_solver": ratio, "training_seconds": trained, "steps": trainer.state.position.step}
    _write_metrics(out, summary, scores, evaluator, trainer.config)
    for table in score_tables(scores, evaluator.floor, "Digits"):
        console.print(table)
    console.print(f"one-step energy distance / best solver's: {ratio:.2f}")
    console.print(
        f"trained {trained:.0f} s, all {time.perf_counter() - start:.0f} s; "
        f"see {out}/samples.png, {out}/loss.png, {out}/metrics.json",
        markup=False,
    )


def _draw(out: Path, generator, real: Tensor) -> None:
    result = sample(
        generator.model,
        sampler="meanflow",
        steps=1,
        num=100,
        shape=generator.image_shape,
        seed=1,
        num_classes=generator.num_classes,
        device=generator.device,
    )
    save_comparison(result.images, real, out / "samples.png")
    lines = numbered(read_metrics(out), "squared_error")
    save_loss_curve([x["step"] for x in lines], [x["squared_error"] for x in lines], out / "loss.png")


def _write_metrics(
    out: Path, summary: dict[str, float], scores: list[SamplerScore], evaluator: Evaluator, config: TrainConfig
) -> None:
    metrics = summary | {
        "floor": asdict(evaluator.floor),
        "samplers": {s.name: asdict(s) for s in scores},
        "config": asdict(config),
        "environment": environment(),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")

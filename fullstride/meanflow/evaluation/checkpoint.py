"""`fullstride meanflow evaluate` and `consistency`: the scores of a checkpoint's samplers, as tables and as JSON."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_manifest
from fullstride.meanflow.checkpoints.paces import as_written, chosen_average
from fullstride.meanflow.config.commands import ConsistencyOptions, ScoreOptions
from fullstride.meanflow.config.datasets import row_of
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.sources.known_files import known_files
from fullstride.meanflow.evaluation.evaluator import score_samplers, shared_evaluator
from fullstride.meanflow.evaluation.preflight import check_generating
from fullstride.meanflow.evaluation.scores import SamplerScore, Score, distances_to_best, one_step_ratio, score_tables
from fullstride.meanflow.sampling.generate import Generator, load_generator
from fullstride.meanflow.training.batch_share import all_started
from fullstride.meanflow.training.state import DataFacts
from fullstride.measure.environment import environment
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.next_steps import command, show_next_steps
from fullstride.step.torch import SINGLE, Processes

# Table 3.1 of a consistency check: does one step land where the solvers of the same weights do?
CONSISTENCY = [("meanflow", 1)] + [(solver, steps) for solver in ("euler", "rk4") for steps in (10, 50, 100)]


def evaluate_checkpoint(
    path: Path,
    options: ScoreOptions,
    samplers: list[tuple[str, int]] | None = None,
    *,
    processes: Processes = SINGLE,
    keep: Callable[[Tensor], None] = lambda images: None,
) -> tuple[list[SamplerScore], Score]:
    """The scores of a checkpoint's samplers (None: the configured MeanFlow steps), and the floor.

    Args:
        path: a run's folder or a checkpoint's.
        options: options of the command; those that are given replace the configuration of the evaluation.
        samplers: names and numbers of steps.
        processes: the processes that share the work; collective.
        keep: function called with the images of each sampler on the first process.

    Raises:
        ConfigError: if there is no whole checkpoint, `num_samples` is below 4 and not 0, the device does not have the
            precision or the backend, or the data are not those that the checkpoint was trained on.

    """
    if options.num_samples != 0 and options.num_samples < 4:
        raise ConfigError(
            f"num_samples is {options.num_samples}, expected at least 4, or 0 for the number of held-out images"
        )
    generator = load_generator(path, options.device, options.ema)
    if options.data_path and row_of(generator.config.data.name).made:
        raise ConfigError(f"--data-path {options.data_path}: data={generator.config.data.name} comes with scikit-learn")
    config = generator.config.evaluation
    asked = {key: value for key, value in vars(options).items() if value and key in vars(config)}
    config = dataclasses.replace(config, **asked)
    check_generating(config, generator.device, asked)
    data = _data_of(generator, path, options.data_path)
    evaluator = shared_evaluator(data, config, generator.device, processes)
    assert evaluator is not None
    rows = samplers or [("meanflow", steps) for steps in config.steps]
    return score_samplers(evaluator, generator.model, rows, generator.num_classes, keep), evaluator.floor


def _data_of(generator: Generator, path: Path, data_path: str) -> Dataset:
    """The data that a run was trained on, from another place if there is one."""
    settings = generator.config.data
    try:
        known = known_files(find_checkpoint(path).parents[1])
        data = load_data(dataclasses.replace(settings, path=data_path or settings.path), known)
    except ConfigError as error:
        moved = bool(settings.path) and not data_path
        raise ConfigError(f"{error}; if the data were moved, give --data-path" if moved else str(error)) from None
    if DataFacts.of(data) != generator.data:
        raise ConfigError(
            f"data={data.name}: not the data that {path} was trained on; give the original data as --data-path"
        )
    return data


def _scored(checkpoint: Path, options: ScoreOptions) -> dict[str, Any]:
    """Facts about the weights that were scored, and the settings of the generation."""
    config = config_from_dict(read_manifest(checkpoint)["config"])
    ema = as_written(chosen_average(config.ema, options.ema))
    keys = ("precision", "backend", "batch_size")
    asked = {key: getattr(options, key) or getattr(config.evaluation, key) for key in keys}
    return {"checkpoint": checkpoint.name, "ema": ema, **asked}


def evaluate_command(checkpoint: Path, options: ScoreOptions) -> None:
    """Print the tables of a run or checkpoint, and write evaluation.json in its folder; see `evaluate_checkpoint`.

    Processes that torchrun has started share the images; the first one prints.

    With `ConsistencyOptions`: one MeanFlow step, Euler and RK4 of the same weights, their ratio, and how far apart
    their images of the same noise are, into consistency.json.
    """
    images: list[Tensor] = []
    consistency = isinstance(options, ConsistencyOptions)
    more: dict[str, Any] = {"samplers": CONSISTENCY, "keep": images.append} if consistency else {}
    with all_started(options.device) as processes:
        # Once, and its settings as well: the run may go on meanwhile, and remove this checkpoint.
        found = processes.led(lambda: find_checkpoint(checkpoint))
        scored = processes.led(lambda: _scored(found, options))
        scores, floor = evaluate_checkpoint(found, options, processes=processes, **more)
        if processes.leads:
            _tell(checkpoint, scored, scores, floor, images)


def _tell(
    checkpoint: Path, scored: dict[str, Any], scores: list[SamplerScore], floor: Score, images: list[Tensor]
) -> None:
    """Print and write the scores; with images, those of a consistency check."""
    console, more = Console(), {}
    for table in score_tables(scores, floor, str(checkpoint)):
        console.print(table)
    if images:
        best, rms = distances_to_best(scores, images)
        more = {"rms_distances": {"to": best, "of": rms}}
        console.print(f"one-step energy distance / best solver's: {one_step_ratio(scores):.2f}")
        told = ", ".join(f"{name} {value:.3g}" for name, value in rms.items())
        console.print(f"root mean square distance to {best} from the same noise: {told}", soft_wrap=True)
    path = checkpoint / ("consistency.json" if images else "evaluation.json")
    values = scored | {"floor": asdict(floor), "samplers": {s.name: asdict(s) for s in scores}} | more
    replace_file(path, json.dumps(values | {"environment": environment()}, indent=1) + "\n")
    other = ("evaluate", "MeanFlow steps") if images else ("consistency", "one step and the ODE solvers")
    show_next_steps(
        {path: "the scores"},
        {
            command("meanflow", other[0], checkpoint): f"score {other[1]}",
            command("meanflow", "sample", checkpoint): "generate images",
        },
    )

"""How good generated images are, beside the floor: what as many training images score against the held-out split."""

import dataclasses
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fullstride.assets import fetch
from fullstride.bench.environment import environment
from fullstride.errors import ConfigError
from fullstride.files import replace_file
from fullstride.meanflow.checkpoint import find_checkpoint, read_manifest
from fullstride.meanflow.config import EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.evaluable import can_classify, check_evaluation, feature_names, inception_weights
from fullstride.meanflow.metrics.classifier import accuracy
from fullstride.meanflow.metrics.energy import energy_distances
from fullstride.meanflow.metrics.features import Features, build_features
from fullstride.meanflow.metrics.reference import FeatureScore, Reference, chosen, reference, reference_classifier
from fullstride.meanflow.samplers import sample
from fullstride.meanflow.sampling import Generator, check_finite, load_generator
from fullstride.meanflow.scores import SamplerScore, Score, one_step_ratio, score_tables
from fullstride.meanflow.state import DataFacts
from fullstride.meanflow.together import MADE

EVALUATION_SEED = 20_001
# Table 3.1 of a consistency check: does one step land where the solvers of the same weights do?
CONSISTENCY = [("meanflow", 1)] + [(solver, steps) for solver in ("euler", "rk4") for steps in (10, 50, 100)]
Kind = tuple[Features, Reference, FeatureScore]


class Evaluator:
    """Scores images against the held-out split of a data set; reference statistics are kept between runs.

    Attributes:
        floor: the score of as many training images as are generated.

    """

    def __init__(self, data: Dataset, config: EvalConfig, device: torch.device):
        """Prepare the features, their reference and the floor.

        Without `evaluation.features` they are those of a small classifier where the data are pictures of several
        classes, and none otherwise; the energy distance is always there.

        Raises:
            ConfigError: see `check_evaluation`.

        """
        check_evaluation(data, config)
        self.data, self.config, self.device = data, config, device
        self.num = config.num_samples or len(data.test)
        self.classifier = reference_classifier(data, device) if can_classify(data) else None
        self.kinds: dict[str, Kind] = {name: self._kind(name) for name in feature_names(data, config)}
        self._real = self._inputs(data.test)
        self.floor = self._floor()

    def _kind(self, name: str) -> Kind:
        weights = None
        if name == "efficientnet_lite0":
            weights = fetch("efficientnet-lite0")
        elif name == "inception":
            weights = inception_weights(self.config)
        extractor = build_features(name, self.device, classifier=self.classifier, weights=weights)
        return (extractor, *reference(self.data, extractor, num_floor=self.num, num=self.num))

    def _inputs(self, split: Split) -> Tensor:
        """As many inputs of a split as are generated, the same ones each time."""
        return self.data.images(split, chosen(len(split), self.num)).to(self.device)

    def _floor(self) -> Score:
        images = self._inputs(self.data.train)
        labels = self.data.train.labels[chosen(len(self.data.train), self.num)]
        return self._score(images, labels, {name: floor for name, (_, _, floor) in self.kinds.items()})

    def score(self, images: Tensor, labels: Tensor | None) -> Score:
        """Score generated images, made for `labels` if there are any; pictures are clipped to [-1, 1] first.

        Raises:
            FloatingPointError: for images that are not finite.

        """
        images = check_finite(images).to(self.device)
        images = images.clamp(-1, 1) if self.data.pixels else images
        features = {name: real.score(extractor(images)) for name, (extractor, real, _) in self.kinds.items()}
        return self._score(images, labels, features)

    def _score(self, images: Tensor, labels: Tensor | None, features: dict[str, FeatureScore]) -> Score:
        right = None if labels is None or self.classifier is None else accuracy(self.classifier, images, labels)
        unbiased, energy = energy_distances(images, self._real)
        return Score(len(images), len(self._real), energy, unbiased, right, features)

    def sampler_score(self, model: nn.Module, sampler: str, steps: int | None, num_classes: int) -> SamplerScore:
        """Generate with one sampler and score it; the seed is the same for all."""
        labels = torch.arange(self.num) % num_classes if num_classes else None
        start = time.perf_counter()
        result = sample(
            model,
            sampler=sampler,
            steps=steps,
            num=self.num,
            shape=self.data.image_shape,
            seed=EVALUATION_SEED,
            label=labels,
            num_classes=num_classes,
            batch_size=self.config.batch_size,
            device=self.device,
        )
        seconds = time.perf_counter() - start
        return SamplerScore(sampler, steps, result.nfe, seconds, self.score(result.images, labels))

    def meanflow_scores(self, model: nn.Module, num_classes: int) -> dict[str, dict]:
        """The scores of the configured numbers of MeanFlow steps, as JSON-serialisable values."""
        scores = [self.sampler_score(model, "meanflow", steps, num_classes) for steps in self.config.steps]
        return {s.name: asdict(s.score) for s in scores} | {"floor": asdict(self.floor)}


def evaluate_checkpoint(
    path: Path,
    samplers: list[tuple[str, int]] | None,
    num_samples: int,
    device: str,
    *,
    ema: float | None = None,
    features: list[str] | None = None,
    inception_weights: Path | None = None,
    data_path: str = "",
) -> tuple[list[SamplerScore], Score]:
    """The scores of a checkpoint's samplers (None: the configured MeanFlow steps), and the floor.

    Args:
        path: a run's folder or a checkpoint's.
        samplers: names and steps.
        num_samples: 0 for the configured number.
        device: auto, cpu, cuda or mps.
        ema: decay of the average; the run's first if None.
        features: in place of the configured ones.
        inception_weights: file of the weights for `inception`, in place of the configured one.
        data_path: where the data are now, if they were moved since.

    Raises:
        ConfigError: if there is no whole checkpoint, `num_samples` is below 4 and not 0, or the data are not those that
            the checkpoint was trained on.

    """
    if num_samples != 0 and num_samples < 4:
        raise ConfigError(f"num_samples is {num_samples}, expected at least 4, or 0 for as many as were held out")
    generator = load_generator(path, device, ema)
    if data_path and generator.config.data.name in MADE:
        raise ConfigError(f"--data-path {data_path}: data={generator.config.data.name} comes with scikit-learn")
    config = generator.config.evaluation
    config.num_samples = num_samples or config.num_samples
    config.features = features or config.features
    config.inception_weights = str(inception_weights or config.inception_weights)
    data = _data_of(generator, path, data_path)
    evaluator = Evaluator(data, config, generator.device)
    rows = samplers or [("meanflow", steps) for steps in config.steps]
    scores = [evaluator.sampler_score(generator.model, *row, generator.num_classes) for row in rows]
    return scores, evaluator.floor


def _data_of(generator: Generator, path: Path, data_path: str) -> Dataset:
    """The data that a run was trained on, from another place if there is one."""
    settings = generator.config.data
    try:
        data = load_data(dataclasses.replace(settings, path=data_path or settings.path))
    except ConfigError as error:
        moved = bool(settings.path) and not data_path
        raise ConfigError(f"{error}; or, if the data were moved, give --data-path" if moved else str(error)) from None
    if DataFacts.of(data) != generator.data:
        raise ConfigError(f"data={data.name}: not the data that {path} was trained on; give theirs as --data-path")
    return data


def _write(path: Path, scored: dict[str, Any], scores: list[SamplerScore], floor: Score) -> None:
    values = scored | {"floor": asdict(floor), "samplers": {s.name: asdict(s) for s in scores}}
    replace_file(path, json.dumps(values | {"environment": environment()}, indent=1) + "\n")


def _scored(checkpoint: Path, ema: float | None) -> dict[str, Any]:
    """Which weights the scores are of."""
    decay = read_manifest(checkpoint)["config"]["ema"]["decays"][0] if ema is None else ema
    return {"checkpoint": checkpoint.name, "ema": decay}


def evaluate_command(checkpoint: Path, *, consistency: bool = False, **options: Any) -> None:
    """Print the tables of a run or checkpoint, and write evaluation.json in its folder; see `evaluate_checkpoint`.

    With `consistency`, one MeanFlow step beside Euler and RK4 of the same weights, and their ratio, into
    consistency.json.
    """
    found = find_checkpoint(checkpoint)  # once: the run may go on meanwhile
    scores, floor = evaluate_checkpoint(found, CONSISTENCY if consistency else None, **options)
    console = Console()
    for table in score_tables(scores, floor, str(checkpoint)):
        console.print(table)
    if consistency:
        console.print(f"one-step energy distance / best solver's: {one_step_ratio(scores):.2f}")
    path = checkpoint / ("consistency.json" if consistency else "evaluation.json")
    _write(path, _scored(found, options.get("ema")), scores, floor)

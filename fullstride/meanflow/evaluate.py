"""How good generated images are, beside the floor: what as many training images score against the held-out split."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from fullstride.assets import fetch
from fullstride.bench.environment import environment
from fullstride.errors import ConfigError
from fullstride.files import replace_file
from fullstride.meanflow.config import EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.metrics.classifier import accuracy
from fullstride.meanflow.metrics.energy import energy_distance
from fullstride.meanflow.metrics.features import Features, build_features
from fullstride.meanflow.metrics.reference import FeatureScore, Reference, chosen, reference, reference_classifier
from fullstride.meanflow.samplers import sample
from fullstride.meanflow.sampling import load_generator
from fullstride.meanflow.scores import SamplerScore, Score, one_step_ratio, score_tables
from fullstride.meanflow.state import DataFacts
from fullstride.meanflow.validate import MADE

EVALUATION_SEED = 20_001
# Table 3.1 of a consistency check: does one step land where the solvers of the same weights do?
CONSISTENCY = [("meanflow", 1)] + [(solver, steps) for solver in ("euler", "rk4") for steps in (10, 50, 100)]
Kind = tuple[Features, Reference, FeatureScore]


def _labelled(data: Dataset) -> bool:
    return data.pixels and data.num_classes > 0


def _weights(name: str, data: Dataset, config: EvalConfig) -> Path | None:
    """The file of a kind of features; None for the classifier, which is trained on the data."""
    if name == "efficientnet_lite0":
        return fetch("efficientnet-lite0")
    if name == "inception":
        return Path(config.inception_weights)
    if not _labelled(data):
        raise ConfigError(f"evaluation.features=[{name}]: it needs labelled pictures, data={data.name} has none")
    return None


def require_features(data: Dataset, config: EvalConfig, device: torch.device) -> None:
    """Check that the features can be had, so that a run need not train for hours to learn that they cannot.

    Raises:
        ConfigError: for features that these data cannot have, or weights that are missing.

    """
    for name in config.features:
        if (weights := _weights(name, data, config)) is not None:
            build_features(name, device, weights=weights)


class Evaluator:
    """Scores images against the held-out split of a data set; reference statistics are kept between runs.

    Attributes:
        floor: the score of as many training images as are generated.

    """

    def __init__(self, data: Dataset, config: EvalConfig, device: torch.device):
        """Prepare the features, their reference and the floor.

        Without `evaluation.features` they are those of a small classifier where the data are labelled pictures, and
        none otherwise; the energy distance is always there.

        Raises:
            ConfigError: for features that these data cannot have, or weights that are missing.

        """
        self.data, self.config, self.device = data, config, device
        self.num = config.num_samples or len(data.test)
        labelled = _labelled(data)
        self.classifier = reference_classifier(data, device) if labelled else None
        names = config.features or (["classifier"] if labelled else [])
        self.kinds: dict[str, Kind] = {name: self._kind(name) for name in names}
        self._real = self._inputs(data.test)
        self.floor = self._floor()

    def _kind(self, name: str) -> Kind:
        weights = _weights(name, self.data, self.config)
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
        """Score generated images, made for `labels` if there are any; pictures are clipped to [-1, 1] first."""
        images = images.to(self.device)
        images = images.clamp(-1, 1) if self.data.pixels else images
        features = {name: real.score(extractor(images)) for name, (extractor, real, _) in self.kinds.items()}
        return self._score(images, labels, features)

    def _score(self, images: Tensor, labels: Tensor | None, features: dict[str, FeatureScore]) -> Score:
        right = None if labels is None or self.classifier is None else accuracy(self.classifier, images, labels)
        return Score(
            len(images),
            len(self._real),
            energy_distance(images, self._real, unbiased=False),
            energy_distance(images, self._real, unbiased=True),
            right,
            features,
        )

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
    generator.config.data.path = data_path or generator.config.data.path
    data = load_data(generator.config.data)
    if DataFacts.of(data) != generator.data:
        raise ConfigError(f"data={data.name}: not the data that {path} was trained on; give --data-path")
    evaluator = Evaluator(data, config, generator.device)
    rows = samplers or [("meanflow", steps) for steps in config.steps]
    scores = [evaluator.sampler_score(generator.model, *row, generator.num_classes) for row in rows]
    return scores, evaluator.floor


def _write(path: Path, scores: list[SamplerScore], floor: Score) -> None:
    values = {"floor": asdict(floor), "samplers": {s.name: asdict(s) for s in scores}, "environment": environment()}
    replace_file(path, json.dumps(values, indent=1) + "\n")


def evaluate_command(checkpoint: Path, *, consistency: bool = False, **options: object) -> None:
    """Print the tables of a run or checkpoint, and write evaluation.json in its folder; see `evaluate_checkpoint`.

    With `consistency`, one MeanFlow step beside Euler and RK4 of the same weights, and their ratio, into
    consistency.json.
    """
    scores, floor = evaluate_checkpoint(checkpoint, CONSISTENCY if consistency else None, **options)  # pyright: ignore[reportArgumentType]
    console = Console()
    for table in score_tables(scores, floor, str(checkpoint)):
        console.print(table)
    if consistency:
        console.print(f"one-step energy distance / best solver's: {one_step_ratio(scores):.2f}")
    # Last: what took so long to compute is told even where nothing can be written.
    _write(checkpoint / ("consistency.json" if consistency else "evaluation.json"), scores, floor)

"""How good generated images are, beside the floor: what as many training images score against the held-out split."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from fullstride.meanflow.share import all_started
from fullstride.meanflow.state import DataFacts
from fullstride.meanflow.together import MADE
from fullstride.step.torch import ALONE, Processes

EVALUATION_SEED = 20_001
# Table 3.1 of a consistency check: does one step land where the solvers of the same weights do?
CONSISTENCY = [("meanflow", 1)] + [(solver, steps) for solver in ("euler", "rk4") for steps in (10, 50, 100)]
Kind = tuple[Features, Reference, FeatureScore]


class Evaluator:
    """Scores images against the held-out split of a data set; reference statistics are kept between runs.

    Attributes:
        floor: the score of as many training images as are generated.

    """

    def __init__(
        self,
        data: Dataset,
        config: EvalConfig,
        device: torch.device,
        processes: Processes = ALONE,
        guarded: Callable[[Callable[[], Any]], Any] = lambda act: act(),
    ):
        """Prepare the features, their reference and the floor.

        Without `evaluation.features` they are those of a small classifier where the data are pictures of several
        classes, and none otherwise; the energy distance is always there.

        Args:
            data: the data set.
            config: what is computed.
            device: where.
            processes: that share images and their features; the first has the scores. Where there are several, what
                lies in the cache of references is found there by all but the first.
            guarded: runs a part of the work of one process; None of it ends the whole.

        Raises:
            ConfigError: see `check_evaluation`.

        """
        check_evaluation(data, config)
        self.data, self.config, self.device = data, config, device
        self.processes, self._guarded = processes, guarded
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
        images = self._clipped(images)
        return self._scored(images, labels, self._features(images))

    def _clipped(self, images: Tensor) -> Tensor:
        images = check_finite(images).to(self.device)
        return images.clamp(-1, 1) if self.data.pixels else images

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        return {name: extractor(images) for name, (extractor, _, _) in self.kinds.items()}

    def _scored(self, images: Tensor, labels: Tensor | None, features: dict[str, Tensor]) -> Score:
        scores = {name: real.score(features[name].to(self.device)) for name, (_, real, _) in self.kinds.items()}
        return self._score(images, labels, scores)

    def _score(self, images: Tensor, labels: Tensor | None, features: dict[str, FeatureScore]) -> Score:
        right = None if labels is None or self.classifier is None else accuracy(self.classifier, images, labels)
        unbiased, energy = energy_distances(images, self._real)
        return Score(len(images), len(self._real), energy, unbiased, right, features)

    def sampler_score(self, model: nn.Module, sampler: str, steps: int | None, num_classes: int) -> SamplerScore | None:
        """Generate with one sampler and score it; the seed is the same for all. Collective.

        None where `guarded` has ended a process's part.
        """
        labels = torch.arange(self.num) % num_classes if num_classes else None
        own = self.processes.part(self.num)
        part = {"sampler": sampler, "steps": steps, "num_classes": num_classes}
        make = lambda: self._part(model, own, None if labels is None else labels[own.start : own.stop], **part)  # noqa: E731
        parts = self.processes.collect(self.processes.agreed(lambda: self._guarded(make)))
        return self.processes.led(lambda: self._guarded(lambda: self._of_parts(parts, sampler, steps, labels)))

    def _part(self, model: nn.Module, own: range, label: Tensor | None, **chosen: Any) -> "Part":
        """The process's images and their features."""
        start = time.perf_counter()
        result = sample(
            model,
            num=len(own),
            start=own.start,
            label=label,
            shape=self.data.image_shape,
            seed=EVALUATION_SEED,
            batch_size=self.config.batch_size,
            device=self.device,
            **chosen,
        )
        seconds = time.perf_counter() - start
        images = self._clipped(result.images)
        features = {name: values.cpu() for name, values in self._features(images).items()}
        return Part(images.cpu(), result.nfe, seconds, features)

    def _of_parts(
        self, parts: "list[Part | None]", sampler: str, steps: int | None, labels: Tensor | None
    ) -> SamplerScore | None:
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        images = torch.cat([part.images for part in found]).to(self.device)
        nfe = sum(part.nfe * len(part.images) for part in found) / len(images)
        features = {name: torch.cat([part.features[name] for part in found]) for name in self.kinds}
        seconds = max(part.seconds for part in found)
        return SamplerScore(sampler, steps, nfe, seconds, self._scored(images, labels, features))

    def meanflow_scores(self, model: nn.Module, num_classes: int) -> dict[str, dict] | None:
        """The scores of the configured numbers of MeanFlow steps, as JSON-serialisable values; see `sampler_score`."""
        scores = []
        for steps in self.config.steps:
            if (score := self.sampler_score(model, "meanflow", steps, num_classes)) is None:
                return None
            scores.append(score)
        return {s.name: asdict(s.score) for s in scores} | {"floor": asdict(self.floor)}


@dataclass(frozen=True)
class Part:
    """One process's part of a set of images, on the host: the images, what they took, their features by kind."""

    images: Tensor
    nfe: float
    seconds: float
    features: dict[str, Tensor]


def shared_evaluator(
    data: Dataset,
    config: EvalConfig,
    device: torch.device,
    processes: Processes = ALONE,
    guarded: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> Evaluator | None:
    """An `Evaluator` on each process, first on the first one, which leaves in the cache what the others need.

    None where `guarded` has ended the work of a process. Collective.
    """
    make = lambda: guarded(lambda: Evaluator(data, config, device, processes, guarded))  # noqa: E731
    first = processes.agreed(lambda: make() if processes.leads else None)
    other = processes.agreed(lambda: None if processes.leads else make())
    made = first or other
    return made if all(processes.gather(made is not None)) else None


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
    processes: Processes = ALONE,
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
        processes: that share the work; collective.

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
    evaluator = shared_evaluator(data, config, generator.device, processes)
    assert evaluator is not None
    rows = samplers or [("meanflow", steps) for steps in config.steps]
    scores = [evaluator.sampler_score(generator.model, *row, generator.num_classes) for row in rows]
    return [score for score in scores if score is not None], evaluator.floor


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

    Processes that torchrun has started share the images; the first one tells.

    With `consistency`, one MeanFlow step beside Euler and RK4 of the same weights, and their ratio, into
    consistency.json.
    """
    with all_started(options.get("device", "auto")) as processes:
        found = processes.led(lambda: find_checkpoint(checkpoint))  # once: the run may go on meanwhile
        scores, floor = evaluate_checkpoint(found, CONSISTENCY if consistency else None, processes=processes, **options)
        if processes.leads:
            _tell(checkpoint, found, scores, floor, options.get("ema"), consistency=consistency)


def _tell(
    checkpoint: Path, found: Path, scores: list[SamplerScore], floor: Score, ema: float | None, *, consistency: bool
) -> None:
    console = Console()
    for table in score_tables(scores, floor, str(checkpoint)):
        console.print(table)
    if consistency:
        console.print(f"one-step energy distance / best solver's: {one_step_ratio(scores):.2f}")
    path = checkpoint / ("consistency.json" if consistency else "evaluation.json")
    _write(path, _scored(found, ema), scores, floor)

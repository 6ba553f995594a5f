"""Scores of generated images, and the floor: the score of as many training images against the held-out split."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.assets.fetch import fetch
from fullstride.meanflow.config.schema import EvalConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.evaluation.preflight import can_classify, check_evaluation, feature_names, inception_weights
from fullstride.meanflow.evaluation.scores import SamplerScore, Score
from fullstride.meanflow.metrics.classifier import accuracy
from fullstride.meanflow.metrics.energy import EnergyReference
from fullstride.meanflow.metrics.features import Features, build_features
from fullstride.meanflow.metrics.reference import (
    FeatureScore,
    Reference,
    choose_reference,
    reference,
    reference_classifier,
)
from fullstride.meanflow.sampling.generate import check_finite
from fullstride.meanflow.sampling.samplers import EVALUATIONS, sample
from fullstride.process.progress import Progress
from fullstride.runs.atomic_files import note
from fullstride.step.torch import SINGLE, Processes

EVALUATION_SEED = 20_001
Kind = tuple[Features, Reference, FeatureScore]


class Evaluator:
    """Scores images against the held-out split of a data set; reference statistics are cached between runs.

    Attributes:
        floor: the score of as many training images as are generated.

    """

    def __init__(
        self,
        data: Dataset,
        config: EvalConfig,
        device: torch.device,
        processes: Processes = SINGLE,
        guarded: Callable[[Callable[[], Any]], Any] = lambda act: act(),
    ):
        """Prepare the features, their reference and the floor.

        Without `evaluation.features` they are those of a small classifier where the data are pictures of several
        classes, and none otherwise; the energy distance is always there.

        Args:
            data: the data set.
            config: the configuration of the evaluation.
            device: the device that computes.
            processes: that share images and their features; the first has the scores. Where there are several, what
                lies in the cache of references is found there by all but the first.
            guarded: function that runs a part of one process's work; if it returns None, the whole ends.

        Raises:
            ConfigError: see `check_evaluation`.

        """
        check_evaluation(data, config)
        self.data, self.config, self.device = data, config, device
        self.processes, self._guarded = processes, guarded
        self.num = config.num_samples or len(data.test)
        self.classifier = reference_classifier(data, device) if can_classify(data) else None
        self.kinds: dict[str, Kind] = {name: self._kind(name) for name in feature_names(data, config)}
        self._real = EnergyReference(self._inputs(data.test))
        images = self._inputs(data.train)
        labels = data.train.labels[choose_reference(len(data.train), self.num)]
        self.floor = self._score(images, labels, {name: floor for name, (_, _, floor) in self.kinds.items()})

    def _kind(self, name: str) -> Kind:
        weights = None
        if name == "efficientnet_lite0":
            weights = fetch("efficientnet-lite0")
        elif name == "inception":
            weights = inception_weights(self.config)
        extractor = build_features(name, self.device, classifier=self.classifier, weights=weights)
        return (extractor, *reference(self.data, extractor, num_floor=self.num, num=self.num))

    def _inputs(self, split: Split) -> Tensor:
        """Inputs of a split, as many as are generated, and the same ones each time."""
        return self.data.images(split, choose_reference(len(split), self.num)).to(self.device)

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
        unbiased, energy = self._real.distances(images)
        return Score(len(images), self._real.count, energy, unbiased, right, features)

    def sampler_score(
        self,
        model: nn.Module,
        sampler: str,
        steps: int | None,
        num_classes: int,
        keep: Callable[[Tensor], None] = lambda images: None,
    ) -> SamplerScore | None:
        """Generate with one sampler and score it; seed and labels are the same for all. Collective.

        None where `guarded` has ended a process's part. The first process hands the images to `keep`.
        """
        labels = self._labels() if num_classes else None
        own = self.processes.part(self.num)
        part = {"sampler": sampler, "steps": steps, "num_classes": num_classes}
        part |= {"condition": self.data.conditions(self.data.test, self._compared()[own.start : own.stop])}
        make = lambda: self._part(model, own, None if labels is None else labels[own.start : own.stop], **part)  # noqa: E731
        parts = self.processes.collect(self.processes.agreed(lambda: self._guarded(make)))
        return self.processes.led(lambda: self._guarded(lambda: self._of_parts(parts, sampler, steps, labels, keep)))

    def _labels(self) -> Tensor:
        """The labels of the held-out images that samples are compared with, so that classes are equally frequent."""
        return self.data.test.labels[self._compared()]

    def _compared(self) -> Tensor:
        """The held-out images that the samples are compared with.

        Where more are generated than are held out, all in turn, and then some of all of them.
        """
        total = len(self.data.test)
        rounds, rest = divmod(self.num, total)
        return torch.cat([torch.arange(total).repeat(rounds), choose_reference(total, rest)])

    def _part(self, model: nn.Module, own: range, label: Tensor | None, **chosen: Any) -> "EvaluationPart":
        """The process's images and their features; none where there are fewer images than processes."""
        if not own:
            none = {name: torch.empty(0, extractor.dim) for name, (extractor, _, _) in self.kinds.items()}
            return EvaluationPart(torch.empty(0, *self.data.image_shape), 0.0, 0.0, none)
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
            precision=self.config.precision,
            backend=self.config.backend,
            **chosen,
        )
        seconds = time.perf_counter() - start
        images = self._clipped(result.images)
        features = {name: values.cpu() for name, values in self._features(images).items()}
        return EvaluationPart(images.cpu(), result.nfe, seconds, features)

    def _of_parts(
        self,
        parts: "list[EvaluationPart | None]",
        sampler: str,
        steps: int | None,
        labels: Tensor | None,
        keep: Callable[[Tensor], None],
    ) -> SamplerScore | None:
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        images = torch.cat([part.images for part in found])
        keep(images)
        images = images.to(self.device)
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
class EvaluationPart:
    """One process's part of a set of images, on the host: the images, what they took, their features by kind."""

    images: Tensor
    nfe: float
    seconds: float
    features: dict[str, Tensor]


def shared_evaluator(
    data: Dataset,
    config: EvalConfig,
    device: torch.device,
    processes: Processes = SINGLE,
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


def evaluations(sampler: str, steps: int) -> int:
    """Network evaluations of an image by a sampler of fixed steps."""
    return EVALUATIONS[sampler] * steps


def score_samplers(
    evaluator: Evaluator,
    model: nn.Module,
    rows: Sequence[tuple[str, int]],
    num_classes: int,
    keep: Callable[[Tensor], None] = lambda images: None,
) -> list[SamplerScore]:
    """The scores of samplers, of which the first process shows the progress, a line for each. Collective.

    Args:
        evaluator: the evaluator of the images.
        model: the network.
        rows: samplers and their numbers of steps.
        num_classes: number of the network's classes; 0 without labels.
        keep: function called with the images of each sampler on the first process.

    """
    processes, scores, made = evaluator.processes, list[SamplerScore](), 0
    num = max(1, len(processes.part(evaluator.num)))
    total = num * sum(evaluations(*row) for row in rows)
    # An evaluation that a CUDA graph replays counts when its sampler ends.
    counted = model.register_forward_hook(lambda _, __, output: progress.at(progress.done + len(output)))
    try:
        with Progress("scoring", total, brief=True, shown=processes.leads) as progress:
            for place, row in enumerate(rows, 1):
                progress.status = (f"{place}/{len(rows)} {row[0]} {row[1]}",)
                score = evaluator.sampler_score(model, *row, num_classes, keep)
                made += num * evaluations(*row)
                progress.at(made)
                if score is not None:
                    scores.append(score)
                    if processes.leads:
                        plural = "s" if score.nfe != 1 else ""
                        told = f"{score.score.num_samples} samples of {score.nfe:g} evaluation{plural} each"
                        note(f"{place} of {len(rows)}, {score.name}: {told}, {score.seconds:.1f} s")
    finally:
        counted.remove()
    return scores

"""How good generated images are, beside the floor: what the training half itself scores against the held-out half."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fullstride.bench.environment import environment
from fullstride.errors import ConfigError
from fullstride.meanflow.build import Dataset, load_data
from fullstride.meanflow.config import EvalConfig
from fullstride.meanflow.metrics.classifier import accuracy, train_classifier
from fullstride.meanflow.metrics.energy import energy_distance
from fullstride.meanflow.metrics.frechet import frechet_distance
from fullstride.meanflow.samplers import sample
from fullstride.meanflow.sampling import load_generator

EVALUATION_SEED = 20_001
# Table 3.1 of a consistency check: does one step land where the solvers of the same weights do?
CONSISTENCY = [("meanflow", 1)] + [(solver, steps) for solver in ("euler", "rk4") for steps in (10, 50, 100)]

LEGEND = (
    "NFE: network evaluations an image. energy: energy distance of the pixels. Frechet: distance of the features of a "
    "classifier trained on the training half. floor: the training half in place of the samples. labels: share of "
    "samples that the classifier gives the label they were made for. s: seconds of sampling."
)


@dataclass(frozen=True)
class Score:
    """The distances of a set of images to the held-out half; smaller is better, the floor is what real images get.

    Attributes:
        energy_distance: on pixels, V-statistic: the floor of two finite samples is above 0.
        energy_distance_unbiased: the U-statistic; around 0 for equal distributions, possibly below.
        frechet_distance: on the 64 features of a classifier trained on the training half (not an FID).
        label_accuracy: share of images that the classifier gives the label they were made for.

    """

    energy_distance: float
    energy_distance_unbiased: float
    frechet_distance: float
    label_accuracy: float | None


@dataclass(frozen=True)
class SamplerScore:
    """A sampler's row: what it is, what it costs, what it scores."""

    sampler: str
    steps: int | None
    nfe: float
    seconds: float
    score: Score

    @property
    def name(self) -> str:
        """As in `meanflow 1`."""
        return f"{self.sampler} {self.steps}" if self.steps else self.sampler


class Evaluator:
    """Scores images against the held-out half of a data set; trains its feature classifier once, seeded."""

    def __init__(self, data: Dataset, config: EvalConfig, device: torch.device):
        """Train the classifier on the training half and score that half, the floor."""
        self.data, self.config, self.device = data, config, device
        self.classifier = train_classifier(
            data.train_images, data.train_labels, num_classes=data.num_classes, seed=0, device=device
        )
        self._features = self.classifier.features(data.test_images.to(device))
        self.floor = self.score(data.train_images, data.train_labels)

    def score(self, images: Tensor, labels: Tensor | None) -> Score:
        """Score a set of images, values in [-1, 1], made for `labels` if there are any."""
        images = images.clamp(-1, 1).to(self.device)
        real = self.data.test_images.to(self.device)
        return Score(
            energy_distance(images, real, unbiased=False),
            energy_distance(images, real, unbiased=True),
            frechet_distance(self.classifier.features(images), self._features),
            None if labels is None else accuracy(self.classifier, images, labels),
        )

    def sampler_score(self, model: nn.Module, sampler: str, steps: int | None, num_classes: int) -> SamplerScore:
        """Generate with one sampler and score it; the seed is the same for all."""
        num = self.config.num_samples or len(self.data.test_images)
        labels = None
        if num_classes:
            labels = torch.arange(num) % num_classes
        start = time.perf_counter()
        result = sample(
            model,
            sampler=sampler,
            steps=steps,
            num=num,
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


def score_table(scores: list[SamplerScore], floor: Score, title: str) -> Table:
    """One row a sampler: cost, distances, and both beside their floors."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, caption=LEGEND, caption_justify="left")
    for column in ("sampler", "NFE", "energy", "x floor", "Frechet", "x floor", "labels", "s"):
        table.add_column(column, justify="left" if column == "sampler" else "right", no_wrap=True)
    for s in scores:
        table.add_row(s.name, f"{s.nfe:g}", *_cells(s.score, floor), f"{s.seconds:.1f}")
    table.add_section()
    table.add_row("training half", "", *_cells(floor, floor), "")
    return table


def _cells(score: Score, floor: Score) -> list[str]:
    return [
        f"{score.energy_distance:.4f}",
        f"{score.energy_distance / floor.energy_distance:.2f}",
        f"{score.frechet_distance:.3f}",
        f"{score.frechet_distance / floor.frechet_distance:.2f}",
        "" if score.label_accuracy is None else f"{score.label_accuracy:.1%}",
    ]


def one_step_ratio(scores: list[SamplerScore]) -> float:
    """The one-step energy distance over the best solver's, both V-statistics."""
    one = next(s for s in scores if s.sampler == "meanflow" and s.steps == 1)
    solvers = [s.score.energy_distance for s in scores if s.sampler != "meanflow"]
    return one.score.energy_distance / min(solvers)


def evaluate_checkpoint(
    path: Path, samplers: list[tuple[str, int]] | None, num_samples: int, device: str
) -> tuple[list[SamplerScore], Score]:
    """The scores of a checkpoint's samplers (None: the configured MeanFlow steps), and the floor.

    Raises:
        ConfigError: if there is no whole checkpoint, or `num_samples` is 1 or negative.

    """
    if num_samples < 0 or num_samples == 1:
        raise ConfigError(f"num_samples is {num_samples}, expected at least 2, or 0 for as many as were held out")
    generator = load_generator(path, device)
    config = generator.config.evaluation
    config.num_samples = num_samples or config.num_samples
    evaluator = Evaluator(load_data(generator.config.data.name), config, generator.device)
    rows = samplers or [("meanflow", steps) for steps in config.steps]
    scores = [evaluator.sampler_score(generator.model, *row, generator.num_classes) for row in rows]
    return scores, evaluator.floor


def _write(path: Path, scores: list[SamplerScore], floor: Score) -> None:
    values = {"floor": asdict(floor), "samplers": {s.name: asdict(s) for s in scores}, "environment": environment()}
    path.write_text(json.dumps(values, indent=1) + "\n")


def evaluate_command(checkpoint: Path, *, num_samples: int, device: str) -> None:
    """Print the table of MeanFlow steps of a run or checkpoint, and write it to evaluation.json in its folder."""
    scores, floor = evaluate_checkpoint(checkpoint, None, num_samples, device)
    _write(checkpoint / "evaluation.json", scores, floor)
    Console().print(score_table(scores, floor, f"{checkpoint} against the held-out half"))


def consistency_command(checkpoint: Path, *, num_samples: int, device: str) -> None:
    """Print one MeanFlow step beside Euler and RK4 of the same weights, and their ratio; write consistency.json."""
    scores, floor = evaluate_checkpoint(checkpoint, CONSISTENCY, num_samples, device)
    _write(checkpoint / "consistency.json", scores, floor)
    console = Console()
    console.print(score_table(scores, floor, f"{checkpoint}: one step against the solvers"))
    console.print(f"one-step energy distance / best solver's: {one_step_ratio(scores):.2f}")

"""Scores of sets of images, and the tables that show them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fullstride.meanflow.metrics.reference import FeatureScore

LEGEND = (
    "NFE: network evaluations an image. energy: energy distance of the pixels (V-statistic), and its ratio to the "
    "floor, which is what as many training images score; none where those are the held-out ones. labels: share of "
    "samples that the classifier gives the label they were made for. s: seconds of sampling."
)
# A floor below this share of a distance is rounding: the training images are the held-out ones.
ROUNDING = 1e-6
FEATURE_LEGEND = (
    "{label}: Frechet distance on these features, {num_samples} samples against {num_reference} held-out images (the "
    "floor: {floor} training images); it compares at equal counts only. kernel: kernel distance, unbiased at any "
    "counts. precision, recall: share of the samples near real ones, of the real ones near samples."
)


@dataclass(frozen=True)
class Score:
    """The distances of a set of images to the held-out split; smaller is better, the floor is what real images get.

    Attributes:
        num_samples: images scored.
        num_reference: held-out images they were compared with.
        energy_distance: on pixels, V-statistic: the floor of two finite samples is above 0.
        energy_distance_unbiased: the U-statistic; around 0 for equal distributions, possibly below.
        label_accuracy: share of images that the classifier gives the label they were made for.
        features: Frechet distance, kernel distance, precision and recall, for each kind of features.

    """

    num_samples: int
    num_reference: int
    energy_distance: float
    energy_distance_unbiased: float
    label_accuracy: float | None
    features: dict[str, FeatureScore]


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
        """Name of the sampler and its steps, such as `meanflow 1`."""
        return f"{self.sampler} {self.steps}" if self.steps else self.sampler


def one_step_ratio(scores: Sequence[SamplerScore]) -> float:
    """The one-step energy distance over the best solver's, both V-statistics; infinite over one of 0."""
    one = next(s for s in scores if s.sampler == "meanflow" and s.steps == 1)
    solvers = [s.score.energy_distance for s in scores if s.sampler != "meanflow"]
    best = min(solvers)
    return one.score.energy_distance / best if best > 0 else math.inf


def distances_to_best(
    scores: Sequence[SamplerScore], images: Sequence[Float[Tensor, "n c h w"]]
) -> tuple[str, dict[str, float]]:
    """The sampler of most evaluations, and how far each other's images are from its images of the same noise.

    Root mean squares over all elements. Two sets may be equally good and yet map each noise elsewhere: this tells.

    Args:
        scores: of each sampler.
        images: theirs, of the same noise and labels.

    """
    best = max(range(len(scores)), key=lambda i: scores[i].nfe)
    others = [i for i in range(len(scores)) if i != best]
    rms = {scores[i].name: (images[i] - images[best]).double().square().mean().sqrt().item() for i in others}
    return scores[best].name, rms


def score_tables(scores: Sequence[SamplerScore], floor: Score, title: str) -> list[Table]:
    """Cost and energy distance of each sampler, then a table for each kind of features, each with its floor."""
    counts = f"{scores[0].score.num_samples} samples, {floor.num_reference} held-out images"
    table = _table(f"{title}: {counts}", LEGEND, ("NFE", "energy", "x floor", "labels", "s"))
    for s in scores:
        table.add_row(s.name, f"{s.nfe:g}", *_energy(s.score, floor), f"{s.seconds:.1f}")
    table.add_section()
    table.add_row(f"floor: {floor.num_samples} training images", "", *_energy(floor, floor), "")
    return [table, *(_feature_table(name, scores, floor) for name in floor.features)]


def _table(title: str | None, caption: str, columns: Sequence[str]) -> Table:
    named = None if title is None else escape(title)  # a folder's name is no markup
    table = Table(title=named, title_justify="left", box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("sampler", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _times(distance: float, floor: float) -> str:
    return f"{distance / floor:.2f}" if floor > ROUNDING * abs(distance) else ""


def _energy(score: Score, floor: Score) -> list[str]:
    return [
        f"{score.energy_distance:.4f}",
        _times(score.energy_distance, floor.energy_distance),
        "" if score.label_accuracy is None else f"{score.label_accuracy:.1%}",
    ]


def _feature_table(name: str, scores: Sequence[SamplerScore], floor: Score) -> Table:
    best, one = floor.features[name], scores[0].score.features[name]
    legend = FEATURE_LEGEND.format(
        label=one.label, num_samples=one.num_samples, num_reference=one.num_reference, floor=best.num_samples
    )
    table = _table(None, legend, (one.label, "x floor", "kernel", "precision", "recall"))
    for row_name, score in [*((s.name, s.score) for s in scores), ("floor", floor)]:
        if row_name == "floor":
            table.add_section()
        f = score.features[name]
        cells = (f"{f.frechet:.4g}", _times(f.frechet, best.frechet), f"{f.kernel:.3g}")
        table.add_row(row_name, *cells, f"{f.precision:.3f}", f"{f.recall:.3f}")
    return table

"""The settings of objectives that have more of them than `LossConfig`; each is a key, as `loss.exact_from=0.5`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fullstride.meanflow.config.objectives import OBJECTIVES
from fullstride.meanflow.config.schema import LossConfig
from fullstride.settings.fields import Count, Finite, NotNegative, PartShare, Rule, Share
from fullstride.settings.overrides import is_import_path

CLASSIFIER = "classifier"


def _names_features(name: str) -> bool:
    return name == CLASSIFIER or is_import_path(name)


@dataclass
class AlphaFlowConfig(LossConfig):
    """`loss=alphaflow`: from flow matching to the exact derivative."""

    flow_until: Share = 0.1  # share of the run with flow matching for each (r, t)
    exact_from: Share = 0.6  # share of the run from which du/dt is exact
    least_alpha: PartShare = 0.005  # smallest step of a difference, in units of t - r


@dataclass
class WholeImprovedConfig(LossConfig):
    """`loss=imf_whole`: a head for v, and guidance as an input of the network."""

    # largest guidance scale that the network learns
    largest_scale: Annotated[float, Rule("a finite number, at least 1", lambda x: 1 <= x < math.inf)] = 8.0
    scale_power: Finite = 1.0  # p of the scales' density w^-p on [1, largest_scale]


@dataclass
class PerceptualConfig(LossConfig):
    """`loss=perceptual`: improved MeanFlow with a distance of features."""

    # network of the features: the classifier of evaluations, or package.module:Class, made without arguments
    features: Annotated[str, Rule("classifier, or package.module:Class", _names_features)] = "classifier"
    perceptual_weight: NotNegative = 0.4  # weight of the distance
    perceptual_until: Share = 0.8  # largest t of a sample whose features are compared


@dataclass
class TeacherPathConfig(LossConfig):
    """`loss=cmt`: mid-training on a teacher's paths."""

    path_steps: Count = 8  # Heun steps of a path, each of two evaluations of the teacher
    path_pairs: Count = 4  # samples that share a path


OWN: Mapping[str, type[LossConfig]] = {
    "alphaflow": AlphaFlowConfig,
    "imf_whole": WholeImprovedConfig,
    "cmt": TeacherPathConfig,
    "perceptual": PerceptualConfig,
}
LOSSES: Mapping[str, Callable[..., LossConfig]] = {
    name: partial(OWN.get(name, LossConfig), name=name, **row.settings) for name, row in OBJECTIVES.items()
}

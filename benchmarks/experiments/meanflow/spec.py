"""Specification of an experiment: arms that differ in a few settings, with the same seeds and samplers for each.

`phases.toml` declares them, with the settings that they share.
"""

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.recipes import TIMES_V1, as_read
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.settings.fields import walk

Sampler = tuple[str, int | None]
# Settings of where a run lives, which change nothing of what it computes.
ELSEWHERE = ("run_name", "output_dir", "resume", "overwrite", "track", "project", "preset", "log_every", "save_every")
# Settings that uniform times do not read, at the values that they had beside them when runs were named.
UNREAD: Mapping[str, float] = {"logit_normal_mean": -0.6, "logit_normal_std": 1.6}

# Settings that distinguish trainings, which an experiment sets itself.
OWN = ("seed", "run_name", "output_dir", "resume", "overwrite")
Settings = dict[str, str]

SCALES = ("smoke", "cpu", "gpu")
DECLARED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("phases.toml").read_text())


def merged(given: Sequence[str | Mapping[str, Any]]) -> Settings:
    """Merge groups of settings that are named, and settings that stand in their place; what comes later wins."""
    found: Settings = {}
    for one in given:
        group = dict(GROUPS[one] if isinstance(one, str) else one)
        found |= merged(group.pop("of", ())) | group
    return found


GROUPS: Mapping[str, Mapping[str, Any]] = {"times_v1": TIMES_V1, **DECLARED["settings"]}


@dataclass(frozen=True)
class Arm:
    """Arm of a part: one of the compared trainings."""

    name: str  # in tables
    settings: Mapping[str, str]  # overrides of its own; as loss.teacher the name of another arm


@dataclass(frozen=True)
class Part:
    """Part of an experiment: one question."""

    name: str  # short, as `--part` takes it
    title: str  # of its table
    question: str  # what it asks
    arms: tuple[Arm, ...]  # what is compared
    settings: Mapping[str, str]  # overrides of all arms
    scales: Mapping[str, Mapping[str, str]]  # overrides of each scale, which an arm's own win over
    samplers: tuple[Sampler, ...]  # each of which scores every arm


@dataclass(frozen=True)
class Experiment:
    """Experiment, which is one command."""

    name: str  # of the command
    title: str  # for people
    about: str  # what it shows, and what it cannot
    parts: tuple[Part, ...]  # its questions


@dataclass(frozen=True)
class TrainingJob:
    """Training of one arm from one seed, and its scores."""

    settings: Mapping[str, str]  # every override, by key
    seed: int  # of weights, data order, noise and times
    root: str  # the folder of runs
    teacher: "TrainingJob | None" = None  # the training that this one learns from, which must be made before it

    @classmethod
    def of(
        cls, part: Part, arm: Arm, scale: str, seed: int, root: str, overrides: tuple[str, ...] = ()
    ) -> "TrainingJob":
        """Return the job of an arm at a scale; the arm's own settings win over the overrides."""
        given = {**by_key(overrides), **arm.settings}
        taught = next((one for one in part.arms if one.name == arm.settings.get("loss.teacher")), None)
        teacher = None if taught is None else cls.of(part, taught, scale, seed, root, overrides)
        return cls({**as_read({**part.settings, **part.scales[scale]}, given), **given}, seed, root, teacher)

    @cached_property
    def config(self) -> TrainConfig:
        """Return the configuration of the job's run, which resumes where it was stopped.

        ConfigError for a setting that cannot be.
        """
        config = composed(tuple(self.overrides))
        config.seed, config.resume, config.output_dir = self.seed, True, self.root
        if self.teacher is not None:  # the same training wherever the runs lie
            config.loss.teacher = self.teacher.config.run_name
        config.run_name = f"{config.data.name}-{_key(config)}-seed{self.seed}"
        if self.teacher is not None:
            config.loss.teacher = str(Path(self.root) / self.teacher.config.run_name)
        return config

    @property
    def overrides(self) -> list[str]:
        """Return the settings as command-line overrides."""
        return [f"{key}={value}" for key, value in self.settings.items()]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides as settings; ConfigError for one without `=`, a key given twice, or one that is each training's own."""
    if other := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"{', '.join(other)}: expected key=value")
    found: dict[str, str] = {}
    for key, _, value in (override.partition("=") for override in overrides):
        if key in found:
            raise ConfigError(f"{key}={value}: {key} is given twice, expected once")
        found[key] = value
    if own := [key for key in OWN if key in found]:
        raise ConfigError(f"{', '.join(own)}: set for each training by --seed and --runs; omit it")
    return found


def composed(overrides: tuple[str, ...]) -> TrainConfig:
    """A configuration of one's own, composed once for all seeds: checking every key takes a while; ConfigError for a
    setting that cannot be.
    """
    return copy.deepcopy(_kept(overrides))


@cache
def _kept(overrides: tuple[str, ...]) -> TrainConfig:
    return compose(list(overrides))


def _key(config: TrainConfig) -> str:
    """Return a key that equal trainings share, whichever part requests them, so that none is repeated."""
    values = {key: value for key, value in asdict(config).items() if key not in (*ELSEWHERE, "seed", "evaluation")}
    if values["loss"]["time_law"] == "uniform":
        values["loss"] |= UNREAD
    for key in walk(config):  # what came after runs had been named, and is as it was then
        group, _, name = key.name.rpartition(".")
        kind, held = (type(getattr(config, group)), values.get(group, {})) if group else (TrainConfig, values)
        if key.later and key.value == getattr(kind(), name):
            held.pop(name, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]

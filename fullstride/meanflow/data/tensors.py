"""`data=tensors`: samples of any rank from a file: rows of a table, sounds, films, embeddings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fullstride.errors import MOST_SHOWN, ConfigError, one_line, shortened
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.dataset import Dataset, Split, check_finite_records, fingerprint
from fullstride.meanflow.data.sources.folders import hold_out
from fullstride.meanflow.data.sources.known_files import KnownFiles
from fullstride.runs.atomic_files import note

SUFFIXES = (".npy", ".pt", ".safetensors")
SAMPLES, LABELS, CONDITIONS = "samples", "labels", "conditions"
HELD_OUT = ("test", "val")
USUAL = (0.3, 3.0)  # standard deviations that noise of 1 hides neither too early nor too late


def load(config: DataConfig, known: KnownFiles | None = None) -> Dataset:
    """The samples of a file, of which a share is held out, or of a folder's `train` and `test` (or `val`) file.

    A `.safetensors` or `.pt` file holds `samples` (n, ...), floating, and may hold `labels` (n,), integers, and
    `conditions`, floating: a vector (n, d) or a sequence (n, tokens, d) for each sample. A `.npy` file holds the
    samples, `NAME.labels.npy` and `NAME.conditions.npy` next to it the rest; a `.pt` file may be one tensor, too.

    Raises:
        ConfigError: if there is no such file, or it holds anything else, or samples that are not finite.

    """
    first, second = _files(config)
    one = _read(first)
    if second is None:
        held = hold_out([str(i) for i in range(len(one.samples))], one.classes.numpy(), config.holdout)
        halves = [one.rows(torch.from_numpy(~held)), one.rows(torch.from_numpy(held))]
    else:
        halves = [one, _read(second)]
        if halves[1].form != one.form:
            raise ConfigError(f"{second}: holds {halves[1].form}, expected {one.form} as in {first}")
    _tell_spread(one.samples, first)
    shape, condition_shape = tuple(one.samples.shape[1:]), one.condition_shape
    train, test = (Split(half.records, half.classes) for half in halves)
    content = fingerprint(*(x for half in halves for x in (half.records, half.classes)))
    data = Dataset("tensors", train, test, _count_classes(config, halves, first), shape, content, pixels=False)
    if not condition_shape:
        return data
    taken = {"decode": TakeSample(shape), "condition": TakeCondition(math.prod(shape), condition_shape)}
    return replace(data, condition_shape=condition_shape, **taken)


@dataclass(frozen=True)
class TakeSample:
    """The sample in a record that has its condition behind it."""

    shape: tuple[int, ...]

    def __call__(self, raw: Float[Tensor, "b k"], generator: torch.Generator | None = None) -> Float[Tensor, "b *s"]:
        """In fp32."""
        return raw[:, : math.prod(self.shape)].float().unflatten(1, self.shape)


@dataclass(frozen=True)
class TakeCondition:
    """The condition in a record that has it behind `start` numbers of the sample."""

    start: int
    shape: tuple[int, ...]

    def __call__(self, raw: Float[Tensor, "b k"]) -> Float[Tensor, "b *c"]:
        """In fp32."""
        return raw[:, self.start :].float().unflatten(1, self.shape)


@dataclass(frozen=True)
class Rows:
    """Contents of a file: samples, and for each a label and a condition, if there are any."""

    samples: Float[Tensor, "n *s"]
    labels: Int[Tensor, " n"] | None = None
    conditions: Tensor | None = None

    @property
    def classes(self) -> Int[Tensor, " n"]:
        """The label of each sample; 0 without labels."""
        return torch.zeros(len(self.samples), dtype=torch.int64) if self.labels is None else self.labels

    @property
    def condition_shape(self) -> tuple[int, ...]:
        """The shape of one condition."""
        return () if self.conditions is None else tuple(self.conditions.shape[1:])

    @property
    def records(self) -> Tensor:
        """The samples, or samples with their conditions behind them, (n, numbers)."""
        if self.conditions is None:
            return self.samples
        return torch.cat([self.samples.flatten(1), self.conditions.flatten(1).to(self.samples.dtype)], dim=1)

    @property
    def form(self) -> str:
        """What the rows are, in words."""
        labels = "no labels" if self.labels is None else "labels"
        return f"samples {tuple(self.samples.shape[1:])}, {labels}, conditions {self.condition_shape}"

    def rows(self, mask: Tensor) -> "Rows":
        """Some of them."""
        more = [None if x is None else x[mask] for x in (self.labels, self.conditions)]
        return Rows(self.samples[mask], *more)


def _files(config: DataConfig) -> tuple[Path, Path | None]:
    path = config.place
    if path.is_file():
        return path, None
    found = {name: [path / f"{name}{suffix}" for suffix in SUFFIXES] for name in ("train", *HELD_OUT)}
    there = {name: file for name, files in found.items() for file in files if file.is_file()}
    halves = [there[name] for name in HELD_OUT if name in there]
    if "train" not in there or not halves:
        raise ConfigError(
            f"data.path={config.path}: expected a file ({', '.join(SUFFIXES)}) of samples, or a folder with such files "
            "named train and test"
        )
    if config.holdout != DataConfig.holdout:
        raise ConfigError(f"data.holdout={config.holdout:g}: expected none with {halves[0]}; leave it out")
    return there["train"], halves[0]


def _read(file: Path) -> Rows:
    content = _content(file)
    if SAMPLES not in content:
        held = shortened(", ".join(sorted(content)), MOST_SHOWN) or "nothing"
        raise ConfigError(f"{file}: no {SAMPLES} in it; it holds {held}")
    samples = _floating(file, SAMPLES, content[SAMPLES])
    conditions = _floating(file, CONDITIONS, content[CONDITIONS]) if CONDITIONS in content else None
    if conditions is not None and (len(conditions) != len(samples) or conditions.ndim > 3):
        raise ConfigError(
            f"{file}: {CONDITIONS} of shape {tuple(conditions.shape)}, expected ({len(samples)}, length) or "
            f"({len(samples)}, tokens, length)"
        )
    labels = content.get(LABELS)
    if labels is not None and (
        labels.is_floating_point()
        or labels.dtype == torch.bool
        or labels.shape != samples.shape[:1]
        or labels.min() < 0
    ):
        raise ConfigError(
            f"{file}: {LABELS} are {labels.dtype} of shape {tuple(labels.shape)}, expected an integer of 0 or more for "
            f"each of {len(samples)} samples"
        )
    return Rows(samples, None if labels is None else labels.long(), conditions)


def _floating(file: Path, key: str, found: Tensor) -> Tensor:
    if not found.is_floating_point():
        raise ConfigError(f"{file}: {key} are {found.dtype}, expected floating; convert and scale them first")
    if found.ndim < 2 or found.numel() == 0:
        raise ConfigError(f"{file}: {key} of shape {tuple(found.shape)}, expected (n, ...), one for each row")
    return check_finite_records(found, f"{file}: row {{}} of {key}".format)


def read_conditions(file: Path, shape: tuple[int, ...]) -> Float[Tensor, "n *k"]:
    """Conditions to sample with: those of a file as `load` reads it, or a file of conditions alone.

    Raises:
        ConfigError: if there are none of that shape.

    """
    content = _content(file)
    key = CONDITIONS if CONDITIONS in content else SAMPLES
    if key not in content:
        raise ConfigError(f"{file}: no {CONDITIONS} in it, expected some of shape (n, {', '.join(map(str, shape))})")
    found = _floating(file, key, content[key])
    if tuple(found.shape[1:]) != shape:
        raise ConfigError(f"{file}: {CONDITIONS} of shape {tuple(found.shape[1:])}, expected {shape}, as in training")
    return found.float()


def _content(file: Path) -> Mapping[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".npy":
            beside = {key: file.with_suffix(f".{key}.npy") for key in (LABELS, CONDITIONS)}
            more = {key: torch.from_numpy(np.load(each)) for key, each in beside.items() if each.is_file()}
            return {SAMPLES: torch.from_numpy(np.load(file))} | more
        found = torch.load(file, map_location="cpu", weights_only=True) if file.suffix == ".pt" else None
    except (SafetensorError, OSError, ValueError, EOFError, RuntimeError, TypeError, UnpicklingError) as error:
        reason = shortened(one_line(error), MOST_SHOWN)
        raise ConfigError(f"{file}: cannot be read ({reason}); write it again") from None
    if isinstance(found, Tensor):
        return {SAMPLES: found}
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ConfigError(f"{file}: expected {', '.join(SUFFIXES)} with tensors, under the name {SAMPLES}")
    return found


def _count_classes(config: DataConfig, halves: list[Rows], file: Path) -> int:
    if halves[0].labels is None:
        return 0
    largest = max(int(half.classes.max()) for half in halves)
    if config.num_classes and largest >= config.num_classes:
        raise ConfigError(f"{file}: label {largest} with data.num_classes={config.num_classes}; expected below it")
    return config.num_classes or largest + 1


def _tell_spread(samples: Tensor, file: Path) -> None:
    spread = samples.float().std().item()
    if not USUAL[0] <= spread <= USUAL[1]:
        note(
            f"{file}: the samples' standard deviation is {spread:.3g}; times and networks are made for about 1: "
            "subtract the mean and divide by it"
        )

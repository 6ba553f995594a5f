"""`data=latents`: pictures as an autoencoder's latents, read while training and drawn anew at every reading."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.shards import FLIPPED, MOMENTS, SUFFIX, Moments, Shard
from fullstride.meanflow.data.sources.folders import (
    file_sizes,
    fingerprint,
    hold_out,
    list_files,
    note_missing,
    split_folders,
)
from fullstride.meanflow.data.sources.known_files import KnownFiles
from fullstride.runs.atomic_files import read_best_effort

# Of Stable Diffusion's autoencoder (arXiv:2112.10752): its latents times this have about unit variance.
SCALE = 0.18215
# What `fullstride meanflow encode` writes down beside the shards, and in it whether all of them are there.
MADE, WHOLE = "encoded.json", "whole"
LOG_VARIANCE = (-30.0, 20.0)


@dataclass(frozen=True)
class DrawLatents:
    """From moments to latents, scale (mean + exp(log-variance / 2) eps); without a generator scale mean."""

    scale: float = SCALE

    def __call__(
        self, raw: Float[Tensor, "*n d h w"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "*n c h w"]:
        """Draw in fp32, eps from a generator on the moments' device; log-variances are clamped to [-30, 20]."""
        mean, log_variance = raw.float().chunk(2, dim=-3)
        if generator is None:
            return self.scale * mean
        eps = torch.randn(mean.shape, device=mean.device, generator=generator)
        return self.scale * (mean + (log_variance.clamp(*LOG_VARIANCE) / 2).exp() * eps)


def latents(path: Path, *, scale: float = SCALE, holdout: float = 0.1, num_classes: int | None = None) -> Dataset:
    """A set of latents in safetensors files, each with some records.

    The folder holds `train/` and `test/` (or `val/`) with such files, or the files themselves, of whose records a
    fixed share is held out. A file holds `moments` (n, 2c, h, w), floating: c means, then c log-variances; `labels`
    (n,), integers; and `moments_flip` like `moments`, those of the mirrored pictures, if all files do. A record is
    (2c, h, w) as stored; `Split.flipped` reads the mirrored ones.

    Args:
        path: the folder.
        scale: what latents are multiplied by.
        holdout: the share held out of every class where there is no `test/` or `val/`.
        num_classes: None for one more than the largest label, which must then be below the number of records; 0 for
            latents without classes, labelled 0.

    Returns:
        The data set; its fingerprint covers names and sizes of files, labels, and each file's first record.

    Raises:
        ConfigError: for settings out of range, a folder without shards, or a shard that is damaged, incomplete, unlike
            the first, or with a label out of range, or an encoding that is not finished.

    """
    if not scale > 0:
        raise ConfigError(f"data.scale={scale}: expected a number above 0, such as {SCALE}")
    # Shards that an encoding has written so far are no data set until it says that all are there.
    if (path / MADE).is_file() and not read_best_effort(path / MADE).get(WHOLE, False):
        raise ConfigError(
            f"{path}: its encoding is not finished; run the same `fullstride meanflow encode` again to continue"
        )
    root, test_folder = split_folders(path)
    folders = [root] if test_folder is None else [root, test_folder]
    read = [_shards(folder) for folder in folders]
    shards = [shard for group in read for shard in group]
    _check_alike(shards)
    classes = _count_classes(shards, num_classes)
    train, test = _splits(shards, sum(len(s.labels) for s in read[0]) if test_folder else None, holdout)
    channels, height, width = shards[0].shape
    shape = (channels // 2, height, width)
    names = [shard.file.relative_to(path).as_posix() for shard in shards]
    # What tells apart two sets of the same shape: all labels, and the first record of each file.
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.labels.numpy().tobytes())
        digest.update(Moments([shard], np.zeros(1, dtype=int))[0].double().numpy().tobytes())
    settings = (scale, None if test_folder else holdout, digest.hexdigest())
    identity = fingerprint(file_sizes(path, names), "latents", shape, *settings)
    return Dataset("latents", train, test, classes, shape, identity, DrawLatents(scale), pixels=False)


def load(config: DataConfig, known: KnownFiles | None = None) -> Dataset:
    """The latents of a configuration; which files a run was begun with changes nothing.

    Raises:
        ConfigError: as `latents`, or to be mirrored without being encoded so.

    """
    classes = config.num_classes or None
    data = latents(config.place, scale=config.latent_scale, holdout=config.holdout, num_classes=classes)
    if config.hflip and data.train.flipped is None:
        raise ConfigError(
            f"data.hflip=true: the shards in {config.path} hold no moments_flip, and latents cannot be mirrored "
            "otherwise; encode the mirrored pictures, too, or set data.hflip=false"
        )
    return data


def _shards(folder: Path) -> list[Shard]:
    names, left = list_files(folder, [SUFFIX])
    if not names:
        raise ConfigError(f"{folder}: no *{SUFFIX} file ({left} other files); write some with write_latents")
    note_missing(folder, names)
    files = [folder / name for name in names]
    first, *others = shards = [read_again(partial(Shard.read, file), file.__str__) for file in files]
    for shard in others:
        # A worker stacks records in the type of a batch's first.
        if shard.dtype != first.dtype:
            raise ConfigError(
                f"{shard.file}: {MOMENTS} is {shard.dtype}, expected {first.dtype} as in {first.file}; write all files "
                "with one dtype"
            )
    return shards


def _check_alike(shards: Sequence[Shard]) -> None:
    first = shards[0]
    for shard in shards:
        if shard.shape != first.shape:
            raise ConfigError(
                f"{shard.file}: records of shape {shard.shape}, expected {first.shape} as in {first.file}"
            )
        if shard.flipped != first.flipped:
            has, other = ("has", "has none") if shard.flipped else ("has no", "has some")
            raise ConfigError(f"{shard.file}: {has} {FLIPPED}, {first.file} {other}; expected it in all files or none")


def _count_classes(shards: Sequence[Shard], given: int | None) -> int:
    largest = max(shards, key=lambda shard: int(shard.labels.max()))
    label = int(largest.labels.max())
    records = sum(len(shard.labels) for shard in shards)
    if given is None and label >= records:
        raise ConfigError(
            f"{largest.file}: label {label} in a set of {records} records; count the classes from 0, or set "
            f"data.num_classes={label + 1} if so many are meant"
        )
    if given is None:
        return label + 1
    if given < 0 or label >= max(given, 1):
        raise ConfigError(f"{largest.file}: label {label} with data.num_classes={given}; expected at least {label + 1}")
    return given


def _splits(shards: Sequence[Shard], trained: int | None, holdout: float) -> list[Split]:
    """The training and the held-out split: the first `trained` records and the others, or a share of all."""
    labels = torch.cat([shard.labels for shard in shards])
    if trained is None:
        held = hold_out([str(i) for i in range(len(labels))], labels.numpy(), holdout)
    else:
        held = np.arange(len(labels)) >= trained
    splits = []
    for rows in (np.flatnonzero(~held), np.flatnonzero(held)):
        flipped = Moments(shards, rows, FLIPPED) if shards[0].flipped else None
        splits.append(Split(Moments(shards, rows), labels[torch.from_numpy(rows)], flipped))
    return splits

"""Shards of latents: safetensors files with the moments that an encoder gave for pictures, read a record at a time."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fullstride.errors import MOST_SHOWN, ConfigError, one_line, shortened
from fullstride.meanflow.data.dataset import check_finite_records

SUFFIX = ".safetensors"
MOMENTS, FLIPPED, LABELS = "moments", "moments_flip", "labels"
FLOATING = ("F16", "BF16", "F32", "F64")


def _open(file: Path) -> Any:
    file.open("rb").close()  # whose errors have a number, as safetensors' have not
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        reason = shortened(one_line(error), MOST_SHOWN)
        raise ConfigError(f"{file}: not a whole safetensors file ({reason}); write or copy it again") from None


@dataclass(frozen=True)
class Shard:
    """Contents of one file.

    Attributes:
        file: path of the file.
        shape: shape (2c, h, w) of one record.
        dtype: dtype of the moments, by safetensors' name.
        labels: the label of each record.
        flipped: whether the file holds every record mirrored, too.

    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    labels: Int[Tensor, " n"]
    flipped: bool

    @classmethod
    def read(cls, file: Path) -> "Shard":
        """The shard in that file, of whose moments only the shape is read.

        Raises:
            ConfigError: naming the file and what is missing in it or of another shape, type or range than it should.

        """
        content = _open(file)
        keys = set(content.keys())
        if missing := [key for key in (MOMENTS, LABELS) if key not in keys]:
            held = shortened(", ".join(sorted(keys)), MOST_SHOWN) or "nothing"
            raise ConfigError(f"{file}: no {' and no '.join(missing)}; it holds {held}")
        labels = content.get_tensor(LABELS)
        shape, dtype = _moments_form(file, MOMENTS, content.get_slice(MOMENTS))
        if FLIPPED in keys:
            other, kind = _moments_form(file, FLIPPED, content.get_slice(FLIPPED))
            if other != shape:
                raise ConfigError(f"{file}: {FLIPPED} has shape {other}, expected {shape} as {MOMENTS}")
            if kind != dtype:
                raise ConfigError(
                    f"{file}: {FLIPPED} is {kind}, expected {dtype} as {MOMENTS}; write both with one dtype"
                )
        return cls(file, shape[1:], dtype, _checked_labels(file, labels, shape[0]), FLIPPED in keys)


def _moments_form(file: Path, key: str, found: Any) -> tuple[tuple[int, ...], str]:
    shape, dtype = tuple(found.get_shape()), found.get_dtype()
    if dtype not in FLOATING:
        raise ConfigError(f"{file}: {key} is {dtype}, expected one of {', '.join(FLOATING)}")
    if len(shape) != 4 or shape[1] % 2 or 0 in shape:
        raise ConfigError(f"{file}: {key} has shape {shape}, expected (n, 2c, h, w): c means, then c log-variances")
    return shape, dtype


def _checked_labels(file: Path, labels: Tensor, count: int) -> Int[Tensor, " n"]:
    """The labels as int64: of wider unsigned types than bytes PyTorch knows no minimum."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ConfigError(f"{file}: {LABELS} are {labels.dtype}, expected integers")
    if labels.shape != (count,):
        raise ConfigError(
            f"{file}: {LABELS} have shape {tuple(labels.shape)}, expected one for each of {count} moments"
        )
    labels = labels.long()
    if labels.min() < 0:
        raise ConfigError(f"{file}: label {int(labels.min())}, expected 0 or more; count the classes from 0")
    return labels


class Moments:
    """A store of records in shards, each read where it lies in the file."""

    def __init__(self, shards: Sequence[Shard], rows: np.ndarray, key: str = MOMENTS):
        """Make the store.

        Args:
            shards: files; record indices continue from one to the next.
            rows: indices of the records in this store, in its order.
            key: `moments`, or `moments_flip`.

        """
        self.files = [shard.file for shard in shards]
        self.ends = np.cumsum([len(shard.labels) for shard in shards]).tolist()
        self.rows, self.key = rows, key
        self._slices: dict[int, Any] = {}

    def __len__(self) -> int:
        """The number of records."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Float[Tensor, "d h w"]:
        """Read one.

        Raises:
            OSError: if its file cannot be read at all.
            ConfigError: if it is cut short.

        """
        place, row = self._find(index)
        if place not in self._slices:
            self._slices[place] = _open(self.files[place]).get_slice(self.key)
        return self._slices[place][row]

    def _find(self, index: int) -> tuple[int, int]:
        """Which file a record is in, and its row there."""
        row = int(self.rows[index])
        place = bisect.bisect_right(self.ends, row)
        return place, row - (self.ends[place - 1] if place else 0)

    def origin(self, index: int) -> str:
        """Where a record is from, for messages."""
        place, row = self._find(index)
        return f"{self.files[place]}: record {row} of {self.key}"

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the open files: each process opens its own, when it first reads of one."""
        return self.__dict__ | {"_slices": {}}


def write_shard(file: Path, moments: Tensor, labels: Tensor, moments_flip: Tensor | None = None) -> None:
    """Write one shard, whole or not at all; see `write_latents`.

    Raises:
        ConfigError: if `Shard.read` would refuse it, or for moments that are not finite.

    """
    flipped = {} if moments_flip is None else {FLIPPED: moments_flip}
    content = {MOMENTS: moments, LABELS: labels, **flipped}
    for key in (MOMENTS, *flipped):
        check_finite_records(content[key], f"{file}: record {{}} of {key}".format)
    part = file.with_name(f".{file.name}.part")
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in content.items()}, part)
        Shard.read(part)
        part.chmod(0o644)  # safetensors lets nobody else read
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)


def write_latents(
    path: Path,
    moments: Float[Tensor, "n d h w"],
    labels: Int[Tensor, " m"],
    moments_flip: Float[Tensor, "k d h w"] | None = None,
    shard_size: int = 10_000,
) -> list[Path]:
    """Write latents as `latents` reads them.

    Args:
        path: the folder, created if missing; `.../train` and `.../test` make a set with its own held-out half.
        moments: c means, then c log-variances, as a KL autoencoder's encoder gives them; d = 2c.
        labels: class labels; all 0 if there are no classes.
        moments_flip: moments of the mirrored pictures.
        shard_size: number of records per file.

    Returns:
        The files: 00000.safetensors and so on, all of them or none.

    Raises:
        ConfigError: if the folder has shards already, or `latents` could not read what would be written.

    """
    given = {MOMENTS: moments, LABELS: labels, FLIPPED: moments_flip}
    counts = {key: len(values) for key, values in given.items() if values is not None}
    if len(set(counts.values())) > 1 or shard_size < 1:
        found = ", ".join(f"{count} {key}" for key, count in counts.items())
        raise ConfigError(
            f"{path}: {found} in shards of {shard_size}, expected equal numbers of each, and at least 1 a shard"
        )
    path.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.glob(f"*{SUFFIX}")):
        raise ConfigError(
            f"{path}: holds {found[0].name} already, expected no shards; delete them or choose another folder"
        )
    tensors = [t.split(shard_size) for t in (moments, labels, moments_flip) if t is not None]
    files = [path / f"{i:05d}{SUFFIX}" for i in range(len(tensors[0]))]
    try:
        for file, *parts in zip(files, *tensors, strict=True):
            write_shard(file, *parts)
    except BaseException:
        for file in files:  # a part of a set would be taken for one
            file.unlink(missing_ok=True)
        raise
    return files

"""Data sets as the program uses them: two splits of raw records, and the decoding of a record to a network's input.

A record is what is stored: the bytes of a picture (uint8, (c, h, w)), a picture in [-1, 1] (floating, (c, h, w)), or
the moments of a latent (floating, (2c, h, w)). A split holds its records in one tensor, which then lives on the
training device, or in a store that reads them one by one, which worker processes then do.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor
from torch.utils.data import default_collate

from fullstride.errors import ConfigError
from fullstride.meanflow.data.reading import SkippedRecords, read_again, read_or_next


@runtime_checkable
class Store(Protocol):
    """Records read one at a time, from any process: an object of it is pickled to the workers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class Split:
    """Labelled records.

    Attributes:
        records: one tensor of all records, or a store of them.
        labels: the class of each record; all 0 if there are no classes.
        flipped: a second store, of the same records made from mirrored pictures; None where the records are pictures,
            which are mirrored once they are on the device. An order of `n` records asks for record i mirrored as n + i.
        skips: counts damaged records, each of which the next of its class stands in for; None refuses them.

    """

    records: Tensor | Store
    labels: Int[Tensor, " n"]
    flipped: Store | None = None
    skips: SkippedRecords | None = None

    def __len__(self) -> int:
        """The number of records."""
        return len(self.labels)

    @property
    def in_memory(self) -> bool:
        """Return whether all records are one tensor."""
        return isinstance(self.records, Tensor)

    def read(self, indices: Int[Tensor, " m"]) -> Tensor:
        """The raw records of `indices`, stacked, on the CPU unless a tensor of records lives elsewhere.

        Raises:
            ConfigError: from a store, or for numbers in it that are not finite.
            ReadError: if a record cannot be read for now.

        """
        if isinstance(self.records, Tensor):
            return self.records[indices.to(self.records.device)]
        records, damaged = read_records([self.records], indices.tolist(), self.labels if self.skips else None)
        if self.skips:
            self.skips.add(damaged)
        return records


def read_records(
    stores: Sequence[Store], wanted: Sequence[int], labels: Int[Tensor, " n"] | None
) -> tuple[Shaped[Tensor, "m *s"], list[str]]:
    """Records, stacked, and what was said of damaged ones, which are passed over if there are labels to do so by.

    Args:
        stores: of the same n records, in one form each; index n * j + i is record i of the j-th of them.
        wanted: indices of the records to read.
        labels: of the records; None refuses damaged ones.

    Raises:
        ReadError, ConfigError: as `read_record` and `check_finite_records`.

    """

    def place(index: int) -> tuple[Store, int]:
        form, own = divmod(index, len(stores[0]))
        return stores[form], own

    def read(index: int) -> Tensor:
        return read_record(*place(index))

    found = [(read(i), []) if labels is None else read_or_next(read, labels, i) for i in wanted]
    records = check_finite_records(
        default_collate([record for record, _ in found]), lambda i: origin_of(*place(wanted[i]))
    )
    return records, [message for _, said in found for message in said]


def check_finite_records(records: Tensor, origin: Callable[[int], str]) -> Tensor:
    """The records themselves, (m, ...); one pass over the whole of them, a microsecond for 8,192 numbers.

    Args:
        records: as stored.
        origin: function that names the source of the i-th record, for the message.

    Raises:
        ConfigError: if floating records hold a number that is not finite, or is not in fp32.

    """
    # Largest and smallest value: NaN is both, and an infinity one of them. Both as fp32, which all that follows takes.
    if not records.is_floating_point() or not records.numel():
        return records
    if not all(bound.float().isfinite() for bound in records.aminmax()):
        bad = int((~records.float().isfinite()).flatten(1).any(1).nonzero()[0])
        raise ConfigError(f"{origin(bad)}: holds numbers that are not finite; create the record again, or remove it")
    return records


def read_record(store: Store, index: int) -> Tensor:
    """A record of a store, as `read_again`.

    Raises:
        ReadError: as there.
        ConfigError: from the store.

    """
    return read_again(lambda: store[index], lambda: origin_of(store, index))


def origin_of(store: Store, index: int) -> str:
    """Where a record is from, as far as its store can tell."""
    return getattr(store, "origin", "record {}".format)(index)


Decode = Callable[[Tensor, torch.Generator | None], Tensor]


def decode_images(raw: Tensor, generator: torch.Generator | None = None) -> Float[Tensor, "b *s"]:
    """Pictures in [-1, 1], in fp32: bytes are scaled, floating records are taken as they are."""
    return raw.float() / 127.5 - 1 if raw.dtype == torch.uint8 else raw.float()


@dataclass(frozen=True)
class Dataset:
    """A data set in two disjoint splits.

    Attributes:
        name: the name in `data=name`.
        train: the training split.
        test: the held-out split; generated images are scored against it.
        num_classes: number of classes; 0 if there are no labels.
        image_shape: (channels, height, width) of the network's input, or of any rank.
        fingerprint: sha256 over data that identifies the content; other content is another data set.
        decode: function from raw records to the network's input; if a record is a distribution, it draws from the
            generator, or takes the mean without one.
        pixels: whether inputs are pictures in [-1, 1]; latents are not.
        condition: function from raw records to their conditions (b, ...); None without conditions.
        condition_shape: of one condition, (length,) or (tokens, length); () without.
        files: the list of its files, as `KnownFiles.packed`; empty if the files are not listed.

    """

    name: str
    train: Split
    test: Split
    num_classes: int
    image_shape: tuple[int, ...]
    fingerprint: str
    decode: Decode = decode_images
    pixels: bool = True
    files: bytes = b""
    condition: Callable[[Tensor], Tensor] | None = None
    condition_shape: tuple[int, ...] = ()

    def conditions(self, split: Split, indices: Int[Tensor, " m"]) -> Float[Tensor, "m *k"] | None:
        """The conditions of chosen records, on the CPU; None if there are none."""
        return None if self.condition is None else self.condition(split.read(indices)).cpu()

    def images(self, split: Split, indices: Int[Tensor, " m"]) -> Float[Tensor, "m *s"]:
        """The inputs of chosen records, without randomness, on the CPU."""
        return self.decode(split.read(indices), None).cpu()


def fingerprint(*arrays: Tensor | np.ndarray) -> str:
    """Sha256 over each array's type, shape and bytes, the same on every machine; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        values = array.cpu().numpy() if isinstance(array, Tensor) else array
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        digest.update(f"{values.dtype.str}{values.shape}\n".encode())
        digest.update(values.data)
    return digest.hexdigest()


def every_nth(labels: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Boolean mask of one record in `n` of every class, in random order, the same on every machine.

    The rest is the other split.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))
    # Sorted by class, neighbours differ in nothing but their place: deal them out in turn.
    dealt = order[np.argsort(labels[order], kind="stable")]
    held = np.zeros(len(labels), dtype=bool)
    held[dealt[::n]] = True
    return held


def to_uint8(images: Float[Tensor, "*n c h w"]) -> UInt8[Tensor, "*n c h w"]:
    """Bytes of images in [-1, 1], on the CPU: clamped, then the nearest of 256 levels.

    Raises:
        ValueError: if a pixel is not finite.

    """
    if not images.isfinite().all():
        raise ValueError("images hold pixels that are not finite; the sampler or the network diverged")
    levels = (images.detach().cpu().double().clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8)

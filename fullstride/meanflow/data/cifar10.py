"""`data=cifar10`: 60,000 photographs of ten kinds of things, 32x32 in colour (A. Krizhevsky, 2009).

Its batches are read without running what a pickle asks for: a pickle names functions to call. Here three names stand
for small classes that can hold an array of bytes, and any other is refused; NumPy's own are not called either.
"""

import hashlib
import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.assets.fetch import fetch
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split, fingerprint


class _Bytes:
    """Stand-in for the type of an array: unsigned bytes."""

    def __init__(self, code: bytes | str, *flags: Any):
        if code not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, expected bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which bytes do not have."""


class _Array:
    """Stand-in for NumPy's arrays while they are unpickled."""

    def __init__(self, *placeholder: Any):
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _, shape, _, fortran, data = state
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no batch of CIFAR does")
        return NAMES[module, name]


def read_batch(data: bytes, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (rows, 3, 32, 32) and labels 0..9 of a batch as Python 2 pickled it.

    Raises:
        ValueError: for anything else.

    """
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    # A hostile or damaged stream leads an unpickler into any exception.
    except Exception as error:
        raise ValueError(f"no batch of CIFAR-10 ({error})") from error
    pixels, labels = (batch.get(key) if isinstance(batch, dict) else None for key in (b"data", b"labels"))
    if not isinstance(pixels, _Array) or pixels.values.shape != (rows, 3 * 32 * 32):
        raise ValueError(f"no array of {rows} x 3072 bytes under 'data'")
    if not isinstance(labels, list) or len(labels) != rows or not all(type(x) is int and 0 <= x < 10 for x in labels):
        raise ValueError(f"no list of {rows} labels from 0 to 9 under 'labels'")
    return pixels.values.reshape(rows, 3, 32, 32), np.array(labels, dtype=np.int64)


FOLDER = "cifar-10-batches-py"
ROWS, CLASSES = 10_000, 10
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
# MD5 of the unpacked files, as torchvision lists them: what is unpacked has no other published checksum.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load(path: Path | None = None) -> Dataset:
    """The published split: 50,000 training and 10,000 held-out pictures, (3, 32, 32) bytes.

    Args:
        path: the Python version's archive `cifar-10-python.tar.gz`, the folder that holds it, the folder
            `cifar-10-batches-py` that it unpacks to, or the one around that; fetched and cached without one.

    Raises:
        ConfigError: if the data cannot be had, or is not CIFAR-10's.

    """
    folders = [] if path is None else [path, path / FOLDER]
    unpacked = next((folder for folder in folders if (folder / TEST).is_file()), None)
    return from_batches(read_archive(fetch("cifar10", path)) if unpacked is None else read_folder(unpacked))


def read_archive(file: Path) -> dict[str, bytes]:
    """The batches of an archive, by name; nothing is unpacked to disk.

    Raises:
        ConfigError: for a damaged archive.

    """
    batches = {}
    try:
        with tarfile.open(file, "r:gz") as archive:
            # In the archive's own order: going back would unpack it from its start.
            for member in archive:
                name = member.name.removeprefix(f"{FOLDER}/")
                if name in MD5 and (content := archive.extractfile(member)):
                    batches[name] = content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: {error}; damaged, download it again") from None
    return batches


def read_folder(folder: Path) -> dict[str, bytes]:
    """The batches in a folder, by name.

    Raises:
        ConfigError: if one is missing, or is not the published one.

    """
    batches = {}
    for name, md5 in MD5.items():
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name} in it; unpack cifar-10-python.tar.gz again")
        batches[name] = (folder / name).read_bytes()
        if hashlib.md5(batches[name], usedforsecurity=False).hexdigest() != md5:
            raise ConfigError(f"{folder / name}: not CIFAR-10's (its MD5 differs); unpack cifar-10-python.tar.gz again")
    return batches


def from_batches(batches: dict[str, bytes], rows: int = ROWS) -> Dataset:
    """The data set of six pickled batches of `rows` pictures each.

    Raises:
        ConfigError: for a batch that is missing, or holds anything else than pictures and labels.

    """
    train, test = _joined(batches, TRAIN, rows), _joined(batches, (TEST,), rows)
    return Dataset("cifar10", Split(*train), Split(*test), CLASSES, (3, 32, 32), fingerprint(*train, *test))


def _joined(batches: dict[str, bytes], names: tuple[str, ...], rows: int) -> tuple[Tensor, Tensor]:
    parts = []
    for name in names:
        if name not in batches:
            raise ConfigError(f"data=cifar10: no batch {name}; expected {', '.join(MD5)}; download the archive again")
        try:
            parts.append(read_batch(batches[name], rows))
        except ValueError as error:
            raise ConfigError(f"data=cifar10: {name}: {error}; download the archive again") from None
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return images, labels

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride.assets.registry import ASSETS
from fullstride.errors import ConfigError
from fullstride.meanflow.data import fashion_mnist
from fullstride.meanflow.data.fashion_mnist import read_idx, read_split


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape) + array.tobytes()


def _made(rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)


def _write(folder: Path, images: bytes, labels: bytes) -> tuple[Path, Path]:
    (folder / "images").write_bytes(images)
    (folder / "labels").write_bytes(labels)
    return folder / "images", folder / "labels"


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_pictures_and_labels_are_those_of_the_files(pack, tmp_path, seed):
    pixels, classes = _made(np.random.default_rng(seed), 11)
    images, labels = read_split(*_write(tmp_path, pack(_idx(pixels)), pack(_idx(classes))), 11)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.long
    np.testing.assert_array_equal(images, pixels[:, None])
    np.testing.assert_array_equal(labels, classes)


def test_labels_beyond_the_classes_are_refused(tmp_path, seed):
    pixels, classes = _made(np.random.default_rng(seed), 11)
    classes[7] = 10
    with pytest.raises(ConfigError, match="labels: label 10, expected 0 to 9"):
        read_split(*_write(tmp_path, _idx(pixels), _idx(classes)), 11)


def test_pictures_and_labels_of_different_counts_are_refused(tmp_path, seed):
    pixels, classes = _made(np.random.default_rng(seed), 11)
    with pytest.raises(ConfigError, match=r"labels: sizes \(10,\), expected \(11,\)"):
        read_split(*_write(tmp_path, _idx(pixels), _idx(classes[:10])), 11)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"\0\0\x0d\x03" + data[4:], "magic number 0x00000d03, expected 0x00000803"),
        (lambda data: b"\0\0\x08\x01" + data[4:], "magic number 0x00000801, expected 0x00000803"),
        (lambda data: b"", "magic number 0x, expected"),
        (lambda data: data[:10], r"sizes \(5,\), expected \(5, 4, 3\): truncated"),
        (lambda data: data[:4] + struct.pack(">3I", 5, 3, 4) + data[16:], r"sizes \(5, 3, 4\), expected \(5, 4, 3\)"),
        (lambda data: data[:-1], "59 bytes after its header, expected 60"),
        (lambda data: data + b"\0", "61 bytes after its header, expected 60"),
        (lambda data: gzip.compress(data)[:-9], "Compressed file ended .*damaged, download it again"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(change, reason, tmp_path, seed):
    array = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    (tmp_path / "file").write_bytes(_idx(array))
    np.testing.assert_array_equal(read_idx(tmp_path / "file", array.shape), array)
    (tmp_path / "file").write_bytes(change(_idx(array)))
    with pytest.raises(ConfigError, match=f"file: {reason}"):
        read_idx(tmp_path / "file", array.shape)


def test_a_folder_of_the_four_files_is_the_data_set(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(fashion_mnist, "SIZES", {"train": 30, "test": 20})
    made = {}
    for split, count in (("train", 30), ("test", 20)):
        made[split] = _made(rng, count)
        for kind, array in zip(("images", "labels"), made[split], strict=True):
            name = f"fashion-mnist/{split}-{kind}"
            asset = replace(ASSETS[name], sha256=hashlib.sha256(_idx(array)).hexdigest())
            monkeypatch.setitem(ASSETS, name, asset)
            (tmp_path / asset.file).write_bytes(gzip.compress(_idx(array)))
    data = fashion_mnist.load(tmp_path)
    assert (data.name, data.image_shape, data.num_classes) == ("fashion_mnist", (1, 28, 28), 10)
    for name, split in (("train", data.train), ("test", data.test)):
        np.testing.assert_array_equal(split.records, made[name][0][:, None])
        np.testing.assert_array_equal(split.labels, made[name][1])
    plain = tmp_path / "t10k-labels-idx1-ubyte"
    plain.write_bytes(gzip.decompress((tmp_path / f"{plain.name}.gz").read_bytes()))
    (tmp_path / f"{plain.name}.gz").unlink()
    assert fashion_mnist.load(tmp_path).fingerprint == data.fingerprint
    plain.unlink()
    with pytest.raises(ConfigError, match="no t10k-labels-idx1-ubyte.gz or t10k-labels-idx1-ubyte in this folder"):
        fashion_mnist.load(tmp_path)

import hashlib
import io
import pickle
import tarfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride.assets.registry import ASSETS
from fullstride.errors import ConfigError
from fullstride.meanflow.data import cifar10
from fullstride.meanflow.data.cifar10 import MD5, TEST, TRAIN, from_batches, read_archive, read_batch
from tests.meanflow.data import python2

ROWS = 7


def _made(rng) -> tuple[np.ndarray, list[int]]:
    return rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8), rng.integers(0, 10, ROWS).tolist()


def _pickled(pixels: np.ndarray, labels: list[int]) -> bytes:
    return python2.batch(
        batch_label=python2.text(b"training batch 1 of 5"),
        labels=python2.numbers(labels),
        data=python2.array(pixels),
        filenames=b"](" + python2.text(b"a.png") + b"e",
    )


def _batches(seed: int) -> tuple[dict[str, tuple[np.ndarray, list[int]]], dict[str, bytes]]:
    rng = np.random.default_rng(seed)
    made = {name: _made(rng) for name in MD5}
    return made, {name: _pickled(*batch) for name, batch in made.items()}


def _archive(file: Path, batches: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, data in {"batches.meta": b"names", **dict(reversed(batches.items()))}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file


@pytest.mark.parametrize("fortran", [False, True])
def test_a_batch_is_what_pickle_itself_reads(fortran, seed):
    pixels, labels = _made(np.random.default_rng(seed))
    stream = python2.batch(data=python2.array(pixels, fortran=fortran), labels=python2.numbers(labels))
    with warnings.catch_warnings():
        # Some releases of NumPy warn of pickles that old.
        warnings.simplefilter("ignore")
        known = pickle.loads(stream, encoding="bytes")
    images, classes = read_batch(stream, ROWS)
    np.testing.assert_array_equal(images, known[b"data"].reshape(ROWS, 3, 32, 32))
    np.testing.assert_array_equal(classes, known[b"labels"])
    assert images[2, 1, 3, 4] == pixels[2, 1024 + 3 * 32 + 4]


class _Harmful:
    def __reduce__(self):
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_function_of_a_pickle_is_called(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stream = pickle.dumps({b"data": _Harmful()}, protocol)
    with pytest.raises(ValueError, match="it refers to .*, which no batch of CIFAR does"):
        read_batch(stream, ROWS)
    assert not list(tmp_path.iterdir())
    pickle.loads(stream)
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["getattr", "eval", "__import__"])
def test_no_builtin_is_lent(name):
    with pytest.raises(ValueError, match=f"it refers to __builtin__.{name}"):
        read_batch(b"\x80\x02c__builtin__\n" + name.encode() + b"\n.", ROWS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": python2.numbers([0, 1, 2, 3, 4, 5, 10])}, "no list of 7 labels from 0 to 9"),
        ({"labels": python2.numbers([0, 1, 2, 3, 4, 5, -1])}, "no list of 7 labels from 0 to 9"),
        ({"labels": python2.numbers([0, 1, 2])}, "no list of 7 labels from 0 to 9"),
        ({"labels": python2.text(b"0123456")}, "no list of 7 labels from 0 to 9"),
        ({"data": python2.array(np.zeros((6, 3072), np.uint8))}, "no array of 7 x 3072 bytes"),
        ({"data": python2.array(np.zeros((7, 3071), np.uint8))}, "no array of 7 x 3072 bytes"),
        ({"data": python2.text(b"0" * 7 * 3072)}, "no array of 7 x 3072 bytes"),
        ({"data": python2.array(np.zeros((7, 3072), np.uint8), code=b"O8")}, "an array of type b'O8', expected bytes"),
    ],
)
def test_a_batch_of_anything_else_is_refused(change, reason, seed):
    pixels, labels = _made(np.random.default_rng(seed))
    entries = {"data": python2.array(pixels), "labels": python2.numbers(labels)}
    with pytest.raises(ValueError, match=reason):
        read_batch(python2.batch(**entries | change), ROWS)


@pytest.mark.parametrize("stream", [b"", b"\x80\x02].", b"no pickle", b"\x80\x02}(U"])
def test_what_is_no_batch_is_refused(stream):
    with pytest.raises(ValueError, match="no batch of CIFAR-10|no array of 7 x 3072 bytes"):
        read_batch(stream, ROWS)


def test_the_five_batches_are_joined_in_their_order(seed):
    made, batches = _batches(seed)
    data = from_batches(batches, ROWS)
    assert (data.name, data.image_shape, data.num_classes) == ("cifar10", (3, 32, 32), 10)
    for split, names in ((data.train, TRAIN), (data.test, (TEST,))):
        assert isinstance(split.records, torch.Tensor)
        assert split.records.dtype == torch.uint8
        np.testing.assert_array_equal(split.records.flatten(1), np.concatenate([made[name][0] for name in names]))
        assert split.labels.tolist() == [label for name in names for label in made[name][1]]
    with pytest.raises(ConfigError, match="test_batch: no array of 8 x 3072|data_batch_1: no array of 8 x 3072"):
        from_batches(batches, ROWS + 1)
    del batches["data_batch_3"]
    with pytest.raises(ConfigError, match="no batch data_batch_3"):
        from_batches(batches, ROWS)


@pytest.fixture
def published(tmp_path, monkeypatch, seed) -> dict[str, bytes]:
    """Six batches as if they were CIFAR-10's own."""
    _, batches = _batches(seed)
    monkeypatch.setattr(cifar10, "from_batches", partial(from_batches, rows=ROWS))
    for name, data in batches.items():
        monkeypatch.setitem(MD5, name, hashlib.md5(data).hexdigest())
    digest = hashlib.sha256(_archive(tmp_path / ASSETS["cifar10"].file, batches).read_bytes()).hexdigest()
    monkeypatch.setitem(ASSETS, "cifar10", replace(ASSETS["cifar10"], sha256=digest))
    return batches


def test_archive_and_folder_hold_the_same(published, tmp_path):
    known = from_batches(published, ROWS).fingerprint
    archive = tmp_path / ASSETS["cifar10"].file
    unpacked = tmp_path / "unpacked" / "cifar-10-batches-py"
    unpacked.mkdir(parents=True)
    for name, data in published.items():
        (unpacked / name).write_bytes(data)
    for path in (archive, tmp_path, unpacked, unpacked.parent):
        assert cifar10.load(path).fingerprint == known
    (unpacked / "data_batch_2").write_bytes(published["data_batch_3"])
    with pytest.raises(ConfigError, match="data_batch_2: not CIFAR-10's"):
        cifar10.load(unpacked)
    (unpacked / "data_batch_2").unlink()
    with pytest.raises(ConfigError, match="no data_batch_2 in it"):
        cifar10.load(unpacked)


def test_another_archive_is_refused(published, tmp_path):
    archive = tmp_path / ASSETS["cifar10"].file
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="has sha256"):
        cifar10.load(archive)
    with pytest.raises(ConfigError, match="damaged, download it again"):
        read_archive(archive)
    with pytest.raises(ConfigError, match="no such file or folder"):
        cifar10.load(tmp_path / "nowhere")

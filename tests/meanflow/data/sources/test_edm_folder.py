"""Folders as EDM's dataset_tool writes them, and pictures that lie on their side."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.errors import ConfigError
from fullstride.meanflow.data.sources.image_files import ImageForm, read_header, read_picture
from fullstride.meanflow.data.sources.image_folder import image_folder
from tests.meanflow.data.pictures import pixels, write_picture

COUNT, CLASSES = 23, 5


def write_edm(root, rng, labels):
    """Pictures in chunks that have nothing to do with their classes; their pixels by name."""
    names = [f"{i // 7:05d}/img{i:08d}.png" for i in range(COUNT)]
    made = {name: write_picture(root / name, rng) for name in names}
    listed = None if labels is None else list(map(list, zip(names, labels.tolist(), strict=True)))
    (root / "dataset.json").write_text(json.dumps({"labels": listed}))
    return made


def by_pixels(split):
    raw = split.read(torch.arange(len(split))).permute(0, 2, 3, 1).contiguous()
    return {x.numpy().tobytes(): y for x, y in zip(raw, split.labels.tolist(), strict=True)}


def test_dataset_json_says_the_classes_whatever_the_folders(tmp_path, seed):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, CLASSES, COUNT - 1), CLASSES - 1)
    made = write_edm(tmp_path, rng, labels)
    data = image_folder(tmp_path, holdout=0.3)
    assert data.num_classes == CLASSES
    expected = {made[name].tobytes(): y for name, y in zip(sorted(made), labels.tolist(), strict=True)}
    assert by_pixels(data.train) | by_pixels(data.test) == expected
    assert len(data.test) == int(0.3 * COUNT)


def test_other_labels_are_other_data(tmp_path):
    rng = np.random.default_rng(0)
    made = write_edm(tmp_path, rng, labels := np.arange(COUNT) % CLASSES)
    before = image_folder(tmp_path).fingerprint
    pairs = [[name, int(y)] for name, y in zip(made, labels[::-1], strict=True)]
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": pairs}))
    assert image_folder(tmp_path).fingerprint != before


def test_without_labels_there_are_no_classes(tmp_path):
    write_edm(tmp_path, np.random.default_rng(0), None)
    data = image_folder(tmp_path)
    assert data.num_classes == 0
    assert not data.train.labels.any()


def test_both_halves_have_labels_of_their_own(tmp_path):
    rng = np.random.default_rng(0)
    write_edm(tmp_path / "train", rng, np.arange(COUNT) % CLASSES)
    made = write_edm(tmp_path / "test", rng, np.arange(COUNT) % 2)
    data = image_folder(tmp_path)
    assert data.num_classes == CLASSES
    assert by_pixels(data.test) == {made[name].tobytes(): i % 2 for i, name in enumerate(sorted(made))}
    (tmp_path / "test/dataset.json").write_text('{"labels": null}')
    with pytest.raises(ConfigError, match=r"test: its labels have 0 classes, those of train/ 5 classes"):
        image_folder(tmp_path)
    (tmp_path / "test/dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"test: .*no dataset\.json"):
        image_folder(tmp_path)


def test_chunks_without_their_labels_are_no_classes(tmp_path):
    write_edm(tmp_path, np.random.default_rng(0), None)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"00000/img00000000\.png.*no dataset\.json.*copy it"):
        image_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"labels": [["00000/img00000000.png", 1]]}', "no label for 22 of 23"),
        ('{"labels": [["00000/img00000000.png", 0.5]]}', "0.5 as the label"),
        ('{"labels": [["00000/img00000000.png", [0, 1]]]}', r"\[0, 1\] as the label"),
        ('{"labels": [["00000/img00000000.png", -1]]}', "-1 as the label"),
        ('{"labels": []}', "no label"),
        ('{"images": []}', "expected EDM's"),
        ('{"labels": {"a": 1}}', "expected EDM's"),
        ("{", "expected EDM's"),
        ('{"labels": [["a", 1], ["a", 2]]}', "twice"),
    ],
)
def test_a_dataset_json_that_cannot_be_is_one_line(tmp_path, content, said):
    write_edm(tmp_path, np.random.default_rng(0), None)
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        image_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_their_orientation_says(tmp_path, suffix, orientation):
    """Against NumPy's turns of the stored pixels, by the table of the EXIF standard."""
    stored = np.kron(pixels(np.random.default_rng(1), (3, 2)), np.ones((16, 16, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"quality": 100, "subsampling": 0} if suffix == "jpg" else {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(stored).save(file := tmp_path / f"a.{suffix}", exif=exif, **lossless)  # pyright: ignore[reportArgumentType]
    turns = [
        stored, stored[:, ::-1], stored[::-1, ::-1], stored[::-1], stored.swapaxes(0, 1), np.rot90(stored, -1),
        np.rot90(stored[::-1, ::-1].swapaxes(0, 1), 0), np.rot90(stored),
    ]  # fmt: skip
    expected = torch.tensor(turns[orientation - 1].copy()).permute(2, 0, 1)
    size = (expected.shape[2], expected.shape[1])
    assert read_header(file)[1] == size
    found = read_picture(file, ImageForm(False, size, None))
    torch.testing.assert_close(found.int(), expected.int(), rtol=0, atol=4 if suffix == "jpg" else 0)


def test_more_names_of_the_same_formats(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(10):
        Image.fromarray(pixels(rng, (8, 8))).save(tmp_path / f"{i}.jfif", "JPEG")
        Image.fromarray(pixels(rng, (8, 8))).save(tmp_path / f"{i}.avif")
    data = image_folder(tmp_path)
    assert len(data.train) + len(data.test) == 20
    assert data.train.read(torch.arange(len(data.train))).float().std() > 10

"""Hugging Face data sets on disk, held against the pixels that went into them."""

import io
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.errors import ConfigError
from fullstride.meanflow.data.sources.image_folder import image_folder
from tests.meanflow.data.pictures import pixels
from tests.meanflow.data.sources.test_image_folder import contents

COUNT = 23


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(ConfigError, match=r"Hugging Face data set, which needs the package datasets; .*hugging-face"):
        image_folder(tmp_path)


@pytest.fixture
def library():
    return pytest.importorskip("datasets")


def rows(library, rng, labels, **more):
    """A data set of random pictures, and what reading it must give."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    made = [pixels(rng, (7, 5)) for _ in labels]
    features = {"image": library.Image(), "label": library.ClassLabel(names=list("abcd"))} | more
    pictures = [{"bytes": png(x), "path": None} for x in made]
    columns = {name: labels if name == "label" else pictures for name in features}
    features = library.Features(features)
    table = pa.table(columns, features.arrow_schema)
    # A name of its own spares the library a hash, which some versions of pyarrow and dill cannot make.
    made_set = library.Dataset(table, library.DatasetInfo(features=features), fingerprint=rng.bytes(8).hex())
    return made_set, [(x.tobytes(), y) for x, y in zip(made, labels, strict=True)]


def png(picture) -> bytes:
    Image.fromarray(picture).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("other", ["test", "validation"])
def test_splits_are_the_halves(tmp_path, seed, library, other):
    rng = np.random.default_rng(seed)
    train, expected = rows(library, rng, rng.integers(0, 4, COUNT).tolist())
    test, tested = rows(library, rng, rng.integers(0, 4, 9).tolist())
    library.DatasetDict({"train": train, other: test}).save_to_disk(tmp_path / "a", num_proc=None)
    data = image_folder(tmp_path / "a")
    assert (data.num_classes, data.image_shape) == (4, (3, 5, 7))
    assert contents(data.train) == expected
    assert contents(data.test) == tested
    copied = pickle.loads(pickle.dumps(data.train.records))
    assert torch.equal(copied[5], data.train.read(torch.tensor([5]))[0])


def test_a_set_without_splits_holds_a_share_out(tmp_path, seed, library):
    rng = np.random.default_rng(seed)
    made, expected = rows(library, rng, rng.integers(0, 4, COUNT).tolist())
    made.shuffle(seed=seed).save_to_disk(tmp_path / "a", num_shards=3)
    data = image_folder(tmp_path / "a", holdout=0.3)
    assert len(data.test) == int(0.3 * COUNT)
    assert sorted(contents(data.train) + contents(data.test)) == sorted(expected)
    assert image_folder(tmp_path / "a", holdout=0.3).fingerprint == data.fingerprint


def test_what_cannot_be_is_one_line(tmp_path, library):
    rng = np.random.default_rng(0)
    whole, _ = rows(library, rng, [0, 1, 2] * 4)
    doubled, _ = rows(library, rng, [0] * 12, other=library.Image())
    unlabelled, _ = rows(library, rng, [0, -1, 2] * 4)
    cases = [
        (doubled, "2 columns of pictures among image, label, other"),
        (unlabelled, "-1 in column label, expected a class"),
        (whole.remove_columns("image"), "0 columns of pictures"),
    ]
    for i, (made, said) in enumerate(cases):
        made.save_to_disk(tmp_path / f"{i}")
        with pytest.raises(ConfigError, match=said) as caught:
            image_folder(tmp_path / f"{i}")
        assert "\n" not in str(caught.value)
    whole.remove_columns("label").save_to_disk(tmp_path / "plain")
    assert image_folder(tmp_path / "plain").num_classes == 0
    arrow = next((tmp_path / "plain").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:500])
    with pytest.raises(ConfigError, match="not a whole Hugging Face data set"):
        image_folder(tmp_path / "plain")

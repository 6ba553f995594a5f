import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fullstride.meanflow.data import overfit


@pytest.mark.parametrize(("name", "classes", "each"), [("deterministic", 10, 1), ("multiclass", 4, 10)])
def test_the_sets_are_the_first_digits_of_each_class(name, classes, each):
    data = getattr(overfit, name)()
    assert (data.name, data.num_classes, data.image_shape) == (name, classes, (1, 8, 8))
    assert isinstance(data.train.records, torch.Tensor)
    assert data.train.records.dtype == torch.uint8
    rows, digits = load_digits(return_X_y=True)
    for digit in range(classes):
        found = data.train.records[data.train.labels == digit].flatten(1).numpy()
        assert len(found) == 1280 // classes
        first = rows[digits == digit][:each]
        np.testing.assert_array_equal(found[:each], np.round(first * 255 / 16))
        np.testing.assert_array_equal(found, np.tile(found[:each], (len(found) // each, 1)))


@pytest.mark.parametrize(("name", "pictures"), [("deterministic", 10), ("multiclass", 40)])
def test_both_splits_hold_the_same_few_pictures(name, pictures):
    data = getattr(overfit, name)()
    whole = torch.arange(len(data.train))
    assert len(data.train) == 1280
    assert torch.equal(data.train.read(whole), data.test.read(whole))
    assert torch.equal(data.train.labels, data.test.labels)
    assert len(data.train.read(whole).unique(dim=0)) == pictures
    # Each block of that many records holds every picture once.
    assert len(data.train.read(whole[pictures : 2 * pictures]).unique(dim=0)) == pictures


def test_the_inputs_are_the_digits_to_half_a_level():
    data = overfit.deterministic()
    rows, digits = load_digits(return_X_y=True)
    first = rows[[int(np.argmax(digits == digit)) for digit in range(10)]] / 8 - 1
    inputs = data.images(data.train, torch.arange(10)).flatten(1)
    assert np.abs(inputs.numpy() - first).max() <= 0.5 / 127.5 + 1e-6
    assert inputs.min() == -1
    assert inputs.max() == 1


def test_the_sets_are_the_same_everywhere():
    known = {
        "deterministic": "47786679cf33bbd86c19ed2eb5d4b1d948856d0bc5dcd3bf0d454c46c6534a62",
        "multiclass": "0293d8ec1b836f10528704e230304eb924ccc1dd7400f38328d37c4fc67cb1a9",
    }
    assert {name: getattr(overfit, name)().fingerprint for name in known} == known

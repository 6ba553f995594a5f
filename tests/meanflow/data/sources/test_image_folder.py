import numpy as np
import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.data.sources import image_folder as module
from fullstride.meanflow.data.sources.image_folder import image_folder
from tests.meanflow.data.pictures import write_picture

CLASSES = {"bird": 11, "ant": 7, "cat": 13}


def write_classes(root, rng, size=(7, 5), **kind) -> dict[str, np.ndarray]:
    return {
        f"{name}/{i}.png": write_picture(root / f"{name}/{i}.png", rng, size, **kind)
        for name, count in CLASSES.items()
        for i in range(count)
    }


def contents(split) -> list[tuple[bytes, int]]:
    got = split.read(torch.arange(len(split))).permute(0, 2, 3, 1).contiguous()
    return [(x.numpy().tobytes(), y) for x, y in zip(got, split.labels.tolist(), strict=True)]


def expected(made: dict[str, np.ndarray]) -> list[tuple[bytes, int]]:
    classes = sorted(CLASSES)
    return [(x.tobytes(), classes.index(name.partition("/")[0])) for name, x in sorted(made.items())]


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_two_folders_of_classes(tmp_path, seed, held_out):
    rng = np.random.default_rng(seed)
    train, test = write_classes(tmp_path / "train", rng), write_classes(tmp_path / held_out, rng)
    data = image_folder(tmp_path)
    assert (data.name, data.num_classes, data.image_shape, data.pixels) == ("image_folder", 3, (3, 5, 7), True)
    assert contents(data.train) == expected(train)
    assert contents(data.test) == expected(test)
    assert not data.train.in_memory
    assert data.train.flipped is None
    images = data.images(data.test, torch.tensor([4, 2]))
    assert images.dtype == torch.float32
    torch.testing.assert_close((images[1] + 1) * 127.5, data.test.read(torch.tensor([2]))[0].float())


def test_one_folder_of_classes_holds_some_of_each_out(tmp_path, seed):
    made = write_classes(tmp_path, np.random.default_rng(seed))
    data = image_folder(tmp_path, holdout=0.3)
    assert len(data.test) == 9
    assert [round(0.3 * n) for n in (7, 11, 13)] == torch.bincount(data.test.labels).tolist()
    assert sorted(contents(data.train) + contents(data.test)) == sorted(expected(made))
    assert contents(image_folder(tmp_path, holdout=0.3).test) == contents(data.test)


def test_a_flat_folder_has_no_classes(tmp_path, seed):
    rng = np.random.default_rng(seed)
    made = [write_picture(tmp_path / f"{i:02d}.PNG", rng, mode="L") for i in range(20)]
    data = image_folder(tmp_path)
    assert (data.num_classes, data.image_shape) == (0, (1, 5, 7))
    assert (len(data.train), len(data.test)) == (18, 2)
    whole = contents(data.train) + contents(data.test)
    assert sorted(whole) == sorted((x.tobytes(), 0) for x in made)


def test_classes_may_be_deep_and_other_files_are_left_aside(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(4):
        write_picture(tmp_path / f"train/a/images/{i}.png", rng)
        write_picture(tmp_path / f"train/b/{i}.png", rng)
        write_picture(tmp_path / f"test/b/{i}.png", rng)
    (tmp_path / "train/notes").mkdir()
    for name in ("train/notes/a.txt", "train/list.csv", "train/a/.hidden.png"):
        (tmp_path / name).write_text("no picture")
    data = image_folder(tmp_path)
    assert data.num_classes == 2
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert data.test.labels.tolist() == [1] * 4


def test_sizes_are_brought_to_one(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(10):
        write_picture(tmp_path / f"{i}.png", rng, (9 + 2 * i, 30 - i))
    data = image_folder(tmp_path, image_size=12)
    assert data.image_shape == (3, 12, 12)
    assert data.train.read(torch.arange(9)).shape == (9, 3, 12, 12)
    with pytest.raises(ConfigError, match=r"1.png: .* 11x29 and 9x30 .*; set data.image_size=9"):
        image_folder(tmp_path).train.read(torch.arange(9))


def test_a_grey_picture_among_coloured_ones_makes_no_grey_set(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    made = [write_picture(tmp_path / f"{i}.png", rng, mode="RGB" if i == 6 else "L") for i in range(12)]
    data = image_folder(tmp_path)
    assert data.image_shape == (3, 5, 7)
    whole = dict.fromkeys(contents(data.train) + contents(data.test))
    assert (made[6].tobytes(), 0) in whole
    assert (np.repeat(made[0][..., None], 3, axis=2).tobytes(), 0) in whole
    # Where the coloured one is not among those looked at, it is refused rather than turned grey.
    monkeypatch.setattr(module, "LOOKED_AT", 2)
    assert image_folder(tmp_path).image_shape == (1, 5, 7)
    with pytest.raises(ConfigError, match="6.png: mode RGB, expected grey"):
        image_folder(tmp_path).train.read(torch.arange(10))


def test_the_fingerprint_is_of_files_and_of_what_changes_pixels(tmp_path):
    write_classes(tmp_path, np.random.default_rng(0))

    def identity(**settings) -> str:
        return image_folder(tmp_path, **settings).fingerprint

    settings = [{}, {"image_size": 4}, {"image_size": 5}, {"image_size": 4, "how": "stretch"}, {"holdout": 0.2}]
    found = [identity(**s) for s in settings]
    assert len(set(found)) == 5
    assert found == [identity(**s) for s in settings]
    (tmp_path / "ant/0.png").rename(tmp_path / "ant/00.png")
    assert identity() not in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"how": "crops"}, "data.how=crops: expected one of crop, stretch; did you mean crop"),
        ({"image_size": 0}, "data.image_size=0: expected a number of pixels"),
        ({"holdout": 1.5}, "data.holdout=1.5: expected a share"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, settings, message):
    write_classes(tmp_path, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=message):
        image_folder(tmp_path, **settings)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"no picture \(0 other files\); expected files of .avif .bmp"),
        (["a.txt", "b/c.npz", ".d.png"], r"no picture \(2 other files\)"),
        (["a.png", "b.png", "cats/c.png"], "2 pictures such as a.png next to class folders such as cats/"),
        (["train/a/1.png", "test/b/1.png"], r"test: class b, expected the classes of train/ \(a"),
        (["train/a/1.png", "test/1.png"], r"test: pictures without class, expected the classes of train/ \(a"),
        (["train/1.png", "test/a/1.png"], "test: class a, expected no classes, as in train/"),
        (["train/a/1.png", "test/a/1.txt"], r"test: no picture \(1 other files\)"),
    ],
)
def test_folders_that_make_no_set_are_refused(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        image_folder(tmp_path)


def test_a_damaged_first_picture_is_refused_at_once(tmp_path):
    write_classes(tmp_path, np.random.default_rng(0))
    for file in (tmp_path / "ant").iterdir():
        file.write_text("no picture")
    with pytest.raises(ConfigError, match=r"ant/\d.png: PIL cannot read it"):
        image_folder(tmp_path)

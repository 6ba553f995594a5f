import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.meanflow.data.dataset import to_uint8
from fullstride.meanflow.sampling.files import (
    WRITING,
    add_to_set,
    check_place,
    replace_set,
    write_pictures,
)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(out: Path, seed: int, count: int, classes: torch.Tensor | None = None) -> torch.Tensor:
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    replace_set(out, {"num": count, "seed": seed}, lambda part: write_pictures(part, images.split(3), classes))
    return images


def test_pictures_are_the_nearest_bytes_in_their_order(tmp_path, seed):
    images = put(tmp_path, seed, 7)
    for index, image in enumerate(images):
        with Image.open(tmp_path / f"{index:06d}.png") as file:
            assert np.array_equal(np.asarray(file), to_uint8(image)[0].numpy())
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.mode == "RGB" or grid.mode == "RGBA"


def test_the_grid_of_classes_has_as_many_of_each(tmp_path, monkeypatch):
    seen = {}
    save = lambda images, path, **kwargs: seen.update({path.name: (images, kwargs)})  # noqa: E731
    monkeypatch.setattr("fullstride.meanflow.sampling.grids.save_grid", save)
    classes = torch.tensor([2, 0, 2, 0, 0, 5, 5])
    images = put(tmp_path, 0, 7, classes)
    rows, options = seen["classes.png"]
    assert options == {"columns": 2, "row_captions": ["0", "2", "5"]}
    assert torch.equal(rows, images[[1, 3, 0, 2, 5, 6]])
    assert torch.equal(seen["grid.png"][0], images)


@pytest.mark.parametrize("failing", [0, 3, 6])
def test_a_full_disk_leaves_the_earlier_set(tmp_path, monkeypatch, failing):
    put(tmp_path, 1, 5, torch.arange(5))
    (tmp_path / "notes.txt").write_text("of somebody else")
    before, saved = content(tmp_path), []
    save = Image.Image.save

    def full(image: Image.Image, path: Path) -> None:
        saved.append(path)
        if len(saved) > failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(image, path)

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left"):
        put(tmp_path, 2, 7)
    assert content(tmp_path) == before


def test_a_smaller_set_takes_a_larger_ones_place(tmp_path):
    put(tmp_path, 1, 9, torch.arange(9) % 2)
    (tmp_path / "latents.safetensors").touch()
    (tmp_path / "000099.png").write_text("of somebody else")
    put(tmp_path, 2, 2)
    assert sorted(content(tmp_path)) == ["000000.png", "000001.png", "000099.png", "grid.png", "samples.json"]
    assert json.loads((tmp_path / "samples.json").read_text()) == {"num": 2, "seed": 2}


@pytest.mark.parametrize(
    "record", ["", "[3]", '{"num": null}', '{"num": "many"}', '{"num": 1e999}', '{"seed": 1}', "\udcff"]
)
def test_a_record_that_is_not_ours_removes_nothing(tmp_path, record):
    (tmp_path / "samples.json").write_bytes(record.encode(errors="surrogateescape"))
    (tmp_path / "000005.png").write_text("of somebody else")
    put(tmp_path, 0, 2)
    assert (tmp_path / "000005.png").read_text() == "of somebody else"


def test_what_a_killed_call_left_goes(tmp_path):
    left = tmp_path / f"{WRITING}abc"
    left.mkdir()
    (left / "000000.png").touch()
    put(tmp_path, 0, 2)
    assert not left.exists()


def test_what_another_call_is_writing_stays(tmp_path):
    def write(part: Path) -> None:
        (part / "000000.png").touch()
        put(tmp_path, 1, 2)
        assert (part / "000000.png").is_file()

    replace_set(tmp_path, {"num": 1}, write)
    assert json.loads((tmp_path / "samples.json").read_text()) == {"num": 1}
    assert sorted(content(tmp_path)) == ["000000.png", "samples.json"]


def test_more_of_a_set_is_added_whole_or_not_at_all(tmp_path):
    put(tmp_path, 0, 2)
    before = content(tmp_path)

    def half(part: Path) -> None:
        (part / "more").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        add_to_set(tmp_path, half)
    assert content(tmp_path) == before
    add_to_set(tmp_path, lambda part: (part / "more").touch())
    assert sorted(content(tmp_path)) == sorted([*before, "more"])


def test_a_place_that_cannot_be_is_told_beforehand(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out in ("file", "file/samples", "link", "link/samples"):
        with pytest.raises(OSError, match=WRITING):
            check_place(tmp_path / out)
    check_place(tmp_path / "new" / "samples")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]

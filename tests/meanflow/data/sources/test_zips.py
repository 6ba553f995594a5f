"""Pictures in a zip, held against the same pictures in a folder."""

import pickle
import re
import zipfile

import numpy as np
import pytest
import torch

from fullstride.errors import ConfigError, Damaged
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.dataset import origin_of
from fullstride.meanflow.data.reader import StepReader
from fullstride.meanflow.data.sources import zips
from fullstride.meanflow.data.sources.image_files import ImageFiles
from fullstride.meanflow.data.sources.image_folder import image_folder
from tests.meanflow.data.pictures import write_picture
from tests.meanflow.data.sources.test_edm_folder import CLASSES, COUNT, write_edm
from tests.meanflow.data.sources.test_image_folder import contents, write_classes


def pack(folder, file, around="", method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(file, "w", method) as packed:
        for path in sorted(folder.rglob("*")):
            packed.write(path, around + path.relative_to(folder).as_posix())
    return file


def same(a, b):
    assert (a.num_classes, a.image_shape, a.fingerprint) == (b.num_classes, b.image_shape, b.fingerprint)
    assert contents(a.train) == contents(b.train)
    assert contents(a.test) == contents(b.test)


@pytest.mark.parametrize("around", ["", "set/"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_zip_of_edms_form_is_the_folder(tmp_path, seed, around, method):
    rng = np.random.default_rng(seed)
    write_edm(tmp_path / "a", rng, rng.permutation(np.arange(COUNT) % CLASSES))
    (tmp_path / "a/.hidden.png").write_text("no picture")
    file = pack(tmp_path / "a", tmp_path / "a.zip", around, method)
    same(image_folder(file, holdout=0.3), image_folder(tmp_path / "a", holdout=0.3))


@pytest.mark.parametrize("around", ["", "set/"])
def test_a_zip_of_halves_or_of_classes_is_the_folder(tmp_path, seed, around):
    rng = np.random.default_rng(seed)
    for half in ("train", "test"):
        write_classes(tmp_path / "a" / half, rng)
    for folder in ("a", "a/train"):
        file = pack(tmp_path / folder, tmp_path / "a.zip", around)
        same(image_folder(file), image_folder(tmp_path / folder))
    with pytest.raises(ConfigError, match=r"data.holdout=0.5: expected none with .*a\.zip/test"):
        check_holdout(DataConfig("image_folder", str(pack(tmp_path / "a", tmp_path / "a.zip")), holdout=0.5))


def test_workers_open_it_themselves(tmp_path, seed):
    write_classes(tmp_path / "a", np.random.default_rng(seed))
    split = image_folder(pack(tmp_path / "a", tmp_path / "a.zip")).train
    assert isinstance(split.records, ImageFiles)
    expected = split.read(torch.arange(len(split)))
    order = torch.randperm(len(split))[:24].reshape(6, 4)
    reader = StepReader([split.records], workers=2, pinned=False)
    try:
        assert torch.equal(torch.stack(list(reader.read(iter([order])))), expected[order])
    finally:
        reader.close()
    assert torch.equal(pickle.loads(pickle.dumps(split.records))[3], expected[3])


def write_damaged(tmp_path):
    """A byte of the pixels of one of 20 pictures is another; returns the zip and the picture's name."""
    rng = np.random.default_rng(0)
    for i in range(20):
        write_picture(tmp_path / f"a/{i:02d}.png", rng)
    file = pack(tmp_path / "a", tmp_path / "a.zip", method=zipfile.ZIP_STORED)
    victim = origin_of(image_folder(file).train.records, 5).rpartition("/")[2]  # pyright: ignore[reportArgumentType]
    content, picture = file.read_bytes(), (tmp_path / "a" / victim).read_bytes()
    at = content.index(picture) + picture.index(b"IDAT") + 40
    file.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
    return file, victim


def test_a_damaged_member_is_named_or_passed_over(tmp_path, capfd):
    file, victim = write_damaged(tmp_path)
    config = DataConfig("image_folder", str(file), skip_damaged=1)
    assert len(contents(load_data(config).train)) == 18
    assert victim in capfd.readouterr().err
    with pytest.raises(Damaged, match=rf"a\.zip/{victim}: incomplete or damaged .*copy or pack") as caught:
        contents(image_folder(file, leave_damaged=True).train)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../up.png", r"a member named \.\./up\.png, expected names inside"),
        ("/root.png", "a member named /root.png, expected names inside"),
        ("a/../../up.png", "expected names inside"),
        ("a/0.png", "a/0.png is there twice"),
        ("large.png", "large.png is of 3,001 bytes unpacked, expected at most 3,000"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_that_cannot_be_are_one_line(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr(zips, "LARGEST", 3000)
    write_picture(tmp_path / "a/0.png", np.random.default_rng(0))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(tmp_path / "a/0.png", "a/0.png")
        packed.writestr(name, bytes(9 if name == "a/0.png" else 3001))
    with pytest.raises(ConfigError, match=said) as caught:
        image_folder(tmp_path / "a.zip")
    assert "\n" not in str(caught.value)


def test_a_zip_that_is_encrypted_or_none_is_one_line(tmp_path):
    write_classes(tmp_path / "a", np.random.default_rng(0))
    whole = pack(tmp_path / "a", file := tmp_path / "a.zip").read_bytes()
    file.write_bytes(re.sub(rb"(PK\x01\x02.{4}).", b"\\1\x01", whole, flags=re.S))
    with pytest.raises(ConfigError, match=r"0.png is encrypted, expected a zip without password"):
        image_folder(file)
    for content in (whole[: len(whole) // 2], b"", b"no zip"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.zip: not a complete zip .*copy it again"):
            image_folder(file)
    with pytest.raises(ConfigError, match=r"a\.7z: a file, expected a folder of pictures, or a \.zip"):
        image_folder(file.rename(tmp_path / "a.7z"))

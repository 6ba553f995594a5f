"""Webdataset's shards, held against the pixels that went into them and the same pictures in a folder."""

import io
import json
import os
import pickle
import random
import string
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.errors import ConfigError, Damaged
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.dataset import origin_of
from fullstride.meanflow.data.reader import StepReader
from fullstride.meanflow.data.sources.image_folder import image_folder
from fullstride.meanflow.data.sources.known_files import KnownFiles, changed_files, check_comparable
from fullstride.meanflow.data.sources.webdataset import read_shard
from fullstride.meanflow.training.preflight import check_records
from tests.meanflow.data.pictures import pixels, write_picture
from tests.meanflow.data.sources.test_hugging_face import png
from tests.meanflow.data.sources.test_image_folder import contents

CLASSES = 4


def pack(file, members, form=tarfile.USTAR_FORMAT):
    """A shard of (name, content or TarInfo), as webdataset's writer makes one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=form) as packed:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                packed.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
    return file


def sample(key, picture, label=None, suffix="png"):
    content = png(picture) if isinstance(picture, np.ndarray) else picture
    cls = [] if label is None else [(f"{key}.cls", str(label).encode())]
    return [*cls, (f"{key}.json", b'{"caption": "none"}'), (f"{key}.{suffix}", content), (f"{key}.txt", b"none")]


def write(root, rng, *counts, form=tarfile.USTAR_FORMAT, key="{}"):
    """Shards of so many samples each; what reading them in the order of their names must give."""
    made, at = [], 0
    for shard, count in enumerate(counts):
        labels = rng.integers(0, CLASSES, count).tolist()
        if not made:
            labels[-1] = CLASSES - 1
        pictures = [pixels(rng, (7, 5)) for _ in labels]
        keys = [key.format(f"{at + i:06d}") for i in range(count)]
        members = [part for triple in zip(keys, pictures, labels, strict=True) for part in sample(*triple)]
        pack(root / f"{shard:05d}.tar", members, form)
        made += [(x.tobytes(), y) for x, y in zip(pictures, labels, strict=True)]
        at += count
    return made


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("key", ["{}", "./{}", f"a.b/Ω ü\n/{'long' * 40}/{{}}"])
@pytest.mark.parametrize("held_out", ["test", "val"])
def test_halves_are_read_as_they_were_written(tmp_path, form, key, held_out):
    if form == tarfile.USTAR_FORMAT and len(key) > 9:
        key = "odd name/{}"
    rng = np.random.default_rng(0)
    train = write(tmp_path / "train", rng, 9, 1, 13, form=form, key=key)
    test = write(tmp_path / held_out, rng, 6, form=form, key=key)
    data = image_folder(tmp_path)
    assert (data.num_classes, data.image_shape) == (CLASSES, (3, 5, 7))
    assert contents(data.train) == train
    assert contents(data.test) == test


def test_a_share_of_a_folder_or_of_one_shard_is_held_out(tmp_path, seed):
    rng = np.random.default_rng(seed)
    made = write(tmp_path / "a", rng, 11, 12)
    one = write(tmp_path / "b", rng, 23)
    (tmp_path / "a/00000.json").write_text("{}")
    for path, expected in ((tmp_path / "a", made), (tmp_path / "b/00000.tar", one)):
        data = image_folder(path, holdout=0.3)
        assert len(data.test) == 6
        assert sorted(contents(data.train) + contents(data.test)) == sorted(expected)
        assert image_folder(path, holdout=0.3).fingerprint == data.fingerprint
    for half in ("train", "val"):
        write(tmp_path / "c" / half, rng, 5)
    with pytest.raises(ConfigError, match=r"data.holdout=0.5: expected none with .*c/val"):
        check_holdout(DataConfig("image_folder", str(tmp_path / "c"), holdout=0.5))


def test_labels_may_be_in_json_or_none(tmp_path, capfd):
    rng = np.random.default_rng(0)
    for key in ("cls", "label"):
        parts = [("a.json", json.dumps({"caption": "3", key: 2}).encode()), ("a.input.PNG", png(pixels(rng, (7, 5))))]
        assert [label for _, label in read_shard(pack(tmp_path / "0.tar", parts))] == [2]
    plain = [part for i in range(20) for part in sample(f"{i}", pixels(rng, (7, 5)))]
    data = image_folder(pack(tmp_path / "plain.tar", plain))
    assert (data.num_classes, int(data.train.labels.max())) == (0, 0)
    assert "plain.tar: no .cls in its shards; the data set has no classes" in capfd.readouterr().err


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(string.ascii_letters + string.digits + "_- /é", min_size=1, max_size=30),
            st.binary(max_size=2000),
            st.integers(0, 2000),
            st.sampled_from(["jpg", "JPEG", "image.png", "webp"]),
        ),
        min_size=1,
        unique_by=lambda made: made[0],
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.randoms(use_true_random=False),
)
def test_random_shards_are_read_as_they_were_written(tmp_path_factory, samples, form, order):
    """Whatever lies between a sample's members, and in whatever order they are."""
    keys = [f"k{i}/" + "/".join(part for part in key.split("/") if part) + "x" for i, (key, *_) in enumerate(samples)]
    parts = [part for key, (_, *rest) in zip(keys, samples, strict=True) for part in sample(key, *rest)]
    order.shuffle(parts)
    file = pack(tmp_path_factory.mktemp("random") / "0.tar", parts, form)
    content = file.read_bytes()
    found = {part.name: (content[part.offset :][: part.size], label) for part, label in read_shard(file)}
    assert found == {f"{key}.{end}": (x, y) for key, (_, x, y, end) in zip(keys, samples, strict=True)}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_shard_that_is_cut_short_is_never_a_smaller_one(tmp_path, form):
    """At every block, and at random offsets; after the first block of zeros nothing is missing."""
    write(tmp_path, np.random.default_rng(0), 9, form=form, key="Ω" * 70 + "{}")
    whole = (file := tmp_path / "00000.tar").read_bytes()
    with tarfile.open(file) as packed:
        packed.getmembers()
        end = packed.offset + tarfile.BLOCKSIZE
    draw = random.Random(form)
    for cut in {*range(0, end, tarfile.BLOCKSIZE), *(draw.randrange(end) for _ in range(200)), end - 1}:
        file.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"00000.tar: no.* tar at byte [\d,]+") as caught:
            read_shard(file)
        assert "\n" not in str(caught.value)
    file.write_bytes(whole[:end])
    assert len(read_shard(file)) == 9


def test_damage_within_is_never_a_smaller_shard(tmp_path):
    """A header of zeros or of noise, room that a download left empty, and a shard put behind another."""
    write(tmp_path, np.random.default_rng(0), 9)
    whole = (file := tmp_path / "00000.tar").read_bytes()
    with tarfile.open(file) as packed:
        offsets = [info.offset for info in packed.getmembers()]
    block = tarfile.BLOCKSIZE
    damaged = [
        whole[:at] + middle + whole[at + block :] for at in offsets for middle in (bytes(block), b"\x07" * block)
    ]
    damaged += [whole + whole, whole + bytes(20 * block), whole[: offsets[9]] + bytes(len(whole)), b"no tar" * 1000]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"00000.tar: no.* tar at byte [\d,]+"):
            read_shard(file)


def link(name, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "0.png"
    return name, info


PLAIN = b"not looked at"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([*sample("0", PLAIN, 1), *sample("1", PLAIN)], r"no class for 1 of 2 pictures, such as 1\.png"),
        (sample("0", PLAIN, 1) * 2, r"0\.png and 0\.png belong to one sample"),
        ([*sample("0.left", PLAIN), ("0.right.jpg", PLAIN)], r"0\.left\.png and 0\.right\.jpg belong to one sample"),
        ([*sample("0", PLAIN, 1), ("0.more.cls", b"1")], r"0\.cls and 0\.more\.cls belong to one sample"),
        (sample("0", PLAIN, "cat"), r"0\.cls says 'cat', expected the number of a class"),
        (sample("0", PLAIN, -1), r"0\.cls says '-1'"),
        (sample("0", PLAIN, 1.5), r"0\.cls says '1\.5'"),
        (sample("0", PLAIN, 2**64), r"0\.cls says '18446744073709551616'"),
        ([("0.png", PLAIN), ("0.json", b'{"label": "cat"}')], r"0\.json says 'cat'"),
        ([("0.png", PLAIN), ("0.json", b"{")], r"0\.json says '\{'"),
        ([("0.png", PLAIN), ("0.json", b"[" * 100_000)], r"0\.json says '\[+\.\.\.\[+', expected the number"),
        ([*sample("0", PLAIN, 1), ("1.cls", b"1"), ("1.npy", PLAIN)], r"1\.cls without a picture"),
        ([*sample("0", PLAIN, 1), link("1.png")], r"1\.png is a link, a device"),
        ([*sample("0", PLAIN, 1), link("1.png", tarfile.LNKTYPE)], r"1\.png is a link, a device"),
        ([*sample("0", PLAIN, 1), link("1.cls", tarfile.FIFOTYPE)], r"1\.cls is a link, a device"),
        (sample("../0", PLAIN, 1), r"a member named \.\./0\.cls, expected names inside"),
        (sample("/0", PLAIN, 1), r"a member named /0\.cls, expected names inside"),
        ([("README.md", b"no picture")], r"no picture \(1 other files\)"),
        ([], r"no picture"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, members, said):
    with pytest.raises(ConfigError, match=said) as caught:
        image_folder(pack(tmp_path / "a.tar", members))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("0.png", tarfile.REGTYPE, r"0\.png is of 1,073,741,824 bytes, expected at most 536,870,910"),
        ("0.cls", tarfile.REGTYPE, r"0\.cls is of 1,073,741,824 bytes, expected at most 16,777,216"),
        ("pax", tarfile.XHDTYPE, r"not a complete tar .*a header of 1,073,741,824 bytes"),
        ("long", tarfile.GNUTYPE_LONGNAME, r"not a complete tar .*a header of 1,073,741,824 bytes"),
    ],
)
def test_what_would_fill_the_memory_is_refused_by_its_size(tmp_path, name, kind, said):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, 1 << 30
    with (file := tmp_path / "a.tar").open("wb") as opened:  # a sparse file
        opened.write(info.tobuf())
        opened.seek(info.size, os.SEEK_CUR)
        opened.write(tarfile.TarInfo("1.png" if name == "0.png" else "0.png").tobuf() + bytes(2 * tarfile.BLOCKSIZE))
    with pytest.raises(ConfigError, match=said):
        read_shard(file)


def test_which_shards_are_meant_must_be_clear(tmp_path):
    rng = np.random.default_rng(0)
    write(tmp_path, rng, 5)
    shard = (tmp_path / "00000.tar").rename(tmp_path / "set-train-000.tar")
    for other, said in [
        ("set-validation-00.tar", r"several splits, .*train-000.* and .*validation-00.*folder train/"),
        ("set-001.tar.gz", r"set-001\.tar\.gz is compressed, expected uncompressed tar files; decompress"),
        ("part/more.png", r"pictures such as part/more\.png next to tar files"),
    ]:
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(shard.read_bytes())
        with pytest.raises(ConfigError, match=said):
            image_folder(tmp_path)
        (tmp_path / other).unlink()
    packed = shard.rename(tmp_path / "one.tar.gz")
    for path in (tmp_path, packed):
        with pytest.raises(ConfigError, match=r"one\.tar\.gz is compressed"):
            image_folder(path)
    # Pictures beside what they were unpacked from.
    for i in range(20):
        write_picture(tmp_path / f"cat/{i}.png", rng)
    assert image_folder(tmp_path).num_classes == 1


@pytest.mark.parametrize(("train", "other"), [(1, None), (None, 1), (1, 2)])
def test_both_halves_have_the_same_classes(tmp_path, train, other):
    picture = pixels(np.random.default_rng(0), (7, 5))
    for half, label in (("train", train), ("val", other)):
        pack(tmp_path / half / "0.tar", sample("0", picture, label))
    with pytest.raises(ConfigError, match=r"val: its labels have \d classes, those of train/ \d classes"):
        image_folder(tmp_path)


def test_workers_read_for_themselves(tmp_path, seed):
    write(tmp_path, np.random.default_rng(seed), 20, 20)
    split = image_folder(tmp_path).train
    expected = split.read(torch.arange(len(split)))
    order = torch.randperm(len(split))[:24].reshape(6, 4)
    reader = StepReader([split.records], workers=2, pinned=False)  # pyright: ignore[reportArgumentType]
    try:
        assert torch.equal(torch.stack(list(reader.read(iter([order])))), expected[order])
    finally:
        reader.close()
    assert torch.equal(pickle.loads(pickle.dumps(split.records))[3], expected[3])  # pyright: ignore[reportIndexIssue]


def test_damaged_pictures_are_named_passed_over_or_counted(tmp_path, capfd):
    write(tmp_path, np.random.default_rng(0), 30)
    victim = origin_of(image_folder(tmp_path).train.records, 5)  # pyright: ignore[reportArgumentType]
    file = tmp_path / "00000.tar"
    (part,) = [p for p, _ in read_shard(file) if victim == f"{file}/{p.name}"]
    content = file.read_bytes()
    file.write_bytes(content[: part.offset + 50] + bytes(part.size - 50) + content[part.offset + part.size :])
    config = DataConfig("image_folder", str(tmp_path), skip_damaged=1)
    assert len(contents(load_data(config).train)) == 27
    assert victim in capfd.readouterr().err
    data = image_folder(tmp_path, leave_damaged=True)
    with pytest.raises(Damaged, match=rf"{part.name}: PIL cannot read it"):
        contents(data.train)
    check_records(data, threads=2, allowed=1)
    assert "30 records read, 1 of them faulty" in capfd.readouterr().err
    file.write_bytes(content[: part.offset + 50])
    with pytest.raises(Damaged, match=rf"00000\.tar: ends at byte {part.offset + 50:,}, within .*copy it again"):
        data.train.read(torch.tensor([5]))


def test_changed_shards_are_other_data_whose_pictures_are_named(tmp_path):
    rng = np.random.default_rng(0)
    parts = [part for i in range(30) for part in sample(f"dir/{i:02d}", pixels(rng, (7, 5)), i % CLASSES)]
    file = pack(tmp_path / "0.tar", parts)
    before = image_folder(tmp_path)
    pack(file, [(name, b"3" if name == "dir/04.cls" else content) for name, content in parts])
    assert image_folder(tmp_path).fingerprint != before.fingerprint
    pack(file, parts[4:] + sample("new/1", pixels(rng, (7, 5)), 1))
    known = KnownFiles.unpacked(before.files)
    after = image_folder(tmp_path, known=known)
    now = KnownFiles.unpacked(after.files)
    assert changed_files(known, now) == "1 gone (./0.tar/dir/00.png), 1 new (./0.tar/new/1.png)"
    check_comparable(known, now)
    assert now.held is not None
    assert known.held is not None
    assert now.held == known.held - {"./0.tar/dir/00.png"}


def test_a_missing_shard_is_said(tmp_path, capfd):
    write(tmp_path, np.random.default_rng(0), 4, 4, 4)
    (tmp_path / "00001.tar").unlink()
    assert len(image_folder(tmp_path, holdout=0.25).train) == 6
    assert f"{tmp_path}: 00001.tar is not there; copy what is missing, or go on with the 2" in capfd.readouterr().err

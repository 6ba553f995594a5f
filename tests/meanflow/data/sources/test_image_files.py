import os
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from fullstride.errors import ConfigError, Damaged
from fullstride.meanflow.data.sources import image_files
from fullstride.meanflow.data.sources.image_files import ImageFiles, ImageForm, read_header, read_picture
from tests.meanflow.data.pictures import pixels, write_picture

AS_THEY_ARE = ImageForm(False, (7, 5), None)


def as_read(file, grey=False, size=(7, 5), how=None) -> np.ndarray:
    """(h, w, c) as floating numbers."""
    got = read_picture(file, ImageForm(grey, size, how))
    assert got.dtype == torch.uint8
    assert got.is_contiguous()
    assert got.shape == (1 if grey else 3, size[1], size[0])
    return got.permute(1, 2, 0).numpy().astype(float)


def test_colours_are_taken_byte_for_byte(tmp_path, seed):
    made = write_picture(tmp_path / "a.png", np.random.default_rng(seed))
    np.testing.assert_array_equal(as_read(tmp_path / "a.png"), made)
    assert read_header(tmp_path / "a.png") == ("RGB", (7, 5))


@pytest.mark.parametrize("grey", [True, False])
def test_grey_is_one_channel_or_three_alike(tmp_path, seed, grey):
    made = write_picture(tmp_path / "a.png", np.random.default_rng(seed), mode="L")
    got = as_read(tmp_path / "a.png", grey)
    assert (got == made[..., None]).all()


@pytest.mark.parametrize(("mode", "grey"), [("RGBA", False), ("LA", True), ("LA", False)])
def test_what_is_transparent_lies_over_white(tmp_path, seed, mode, grey):
    made = write_picture(tmp_path / "a.png", np.random.default_rng(seed), mode=mode).astype(float)
    colour, alpha = made[..., :-1], made[..., -1:] / 255
    np.testing.assert_allclose(as_read(tmp_path / "a.png", grey) - (alpha * colour + (1 - alpha) * 255), 0, atol=1.01)


def test_palettes_become_their_colours(tmp_path, seed):
    rng = np.random.default_rng(seed)
    places, palette = rng.integers(0, 9, (5, 7), dtype=np.uint8), rng.integers(0, 256, (9, 3), dtype=np.uint8)
    image = Image.fromarray(places)
    image.putpalette(palette.tobytes())
    image.save(tmp_path / "solid.png")
    np.testing.assert_array_equal(as_read(tmp_path / "solid.png"), palette[places])
    image.save(tmp_path / "hole.png", transparency=4)
    np.testing.assert_array_equal(
        as_read(tmp_path / "hole.png"), np.where((places == 4)[..., None], 255, palette[places])
    )


def test_bits_are_black_and_white(tmp_path, seed):
    bits = np.random.default_rng(seed).integers(0, 2, (5, 7)).astype(bool)
    Image.fromarray(bits).save(tmp_path / "a.png")
    np.testing.assert_array_equal(as_read(tmp_path / "a.png", grey=True)[..., 0], 255 * bits)


def test_a_whole_number_of_halvings_is_the_mean_of_boxes(tmp_path, seed):
    made = write_picture(tmp_path / "a.png", np.random.default_rng(seed), (28, 20))
    x = torch.tensor(made).permute(2, 0, 1).float()
    expected = F.avg_pool2d(x, 4)[:, :, 1:6].permute(1, 2, 0).numpy()
    # Each halving rounds twice.
    np.testing.assert_allclose(as_read(tmp_path / "a.png", size=(5, 5), how="crop"), expected, atol=3.01)


@pytest.mark.parametrize(
    ("size", "halvings"), [((40, 26), 1), ((17, 13), 0), ((13, 13), 0), ((5, 9), 0), ((52, 92), 2)]
)
def test_the_middle_is_cut_from_the_filtered_short_side(tmp_path, seed, size, halvings):
    """Against torch's filters; the middle of the range, where PIL cuts no overshoot off between rows and columns."""
    made = 64 + pixels(np.random.default_rng(seed), size) // 2
    Image.fromarray(made).save(tmp_path / "a.png")
    side = 11
    x = F.avg_pool2d(torch.tensor(made).permute(2, 0, 1)[None].float(), 2**halvings)
    target = [side if n == min(x.shape[2:]) else round(n * side / min(x.shape[2:])) for n in x.shape[2:]]
    x = F.interpolate(x, target, mode="bicubic", antialias=True, align_corners=False)
    top, left = (target[0] - side) // 2, (target[1] - side) // 2
    expected = x[0, :, top : top + side, left : left + side].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(as_read(tmp_path / "a.png", size=(side, side), how="crop"), expected, atol=3.01)


def test_stretching_keeps_everything(tmp_path):
    """A ramp from left to right stays one, whatever the sides."""
    ramp = np.tile(np.linspace(0, 255, 72).astype(np.uint8)[None, :, None], (36, 1, 3))
    Image.fromarray(ramp).save(tmp_path / "a.png")
    got = as_read(tmp_path / "a.png", size=(9, 9), how="stretch")
    np.testing.assert_allclose(got[4, :, 0], (np.arange(9) + 0.5) / 9 * 255, atol=3)
    assert got.std(axis=0).max() == 0


@pytest.mark.parametrize("size", [(7, 5), (6, 5)])
def test_a_picture_of_another_size_is_refused(tmp_path, size):
    write_picture(tmp_path / "odd.png", np.random.default_rng(0), (5, 7))
    width, height = size
    with pytest.raises(ConfigError, match=f"odd.png: .* 5x7 and {width}x{height} .*set data.image_size=5$"):
        read_picture(tmp_path / "odd.png", ImageForm(False, size, None))


@pytest.mark.parametrize("kind", ["cut.png", "cut.jpg", "text.png", "empty.jpg", "noise.gif"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, kind):
    rng = np.random.default_rng(0)
    file = tmp_path / kind
    if kind.startswith("cut"):
        write_picture(file, rng, (64, 64))
        file.write_bytes(file.read_bytes()[:700])
    else:
        file.write_bytes({"text.png": b"not a picture", "empty.jpg": b"", "noise.gif": b"GIF89a" + rng.bytes(99)}[kind])
    with pytest.raises(ConfigError, match=r"^\S+: PIL cannot read it \(.+\); replace or delete the file$"):
        read_picture(file, ImageForm(False, (64, 64), None))
    if not kind.startswith(("cut", "noise")):
        with pytest.raises(ConfigError, match="PIL cannot read it"):
            read_header(file)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_too_large_a_picture_is_refused_and_not_called_damaged(tmp_path, recwarn):
    """By its header, before it takes memory: also one that PIL alone would decode with a warning."""
    write_picture(allowed := tmp_path / "0.png", np.random.default_rng(0), size=(1000, 1001))
    assert read_header(allowed, megapixels=2) == ("RGB", (1000, 1001))
    with pytest.raises(ConfigError, match=r"1000x1001 pixels, expected at most data.max_megapixels=1 million"):
        read_picture(allowed, ImageForm(False, (7, 5), "crop", megapixels=1))
    file, said = tmp_path / "1.png", r"1.png: 10000x9001 pixels, expected .*=90 million; .*up to 178"
    for size, message in [((10000, 9001), said), ((20000, 20000), "1.png: more than 178 million pixels")]:
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0))
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
        with pytest.raises(ConfigError, match=message) as caught:
            read_header(file)
        assert not isinstance(caught.value, Damaged)
        assert "\n" not in str(caught.value)
    os.truncate(file, 1 << 30)
    with pytest.raises(ConfigError, match=r"1.png: 1,073,741,824 bytes, expected at most"):
        read_header(file)
    assert not [warning for warning in recwarn if issubclass(warning.category, Image.DecompressionBombWarning)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_eight_bits_are_refused(tmp_path, dtype):
    Image.fromarray(np.ones((5, 7), dtype)).save(tmp_path / "deep.tiff")
    with pytest.raises(ConfigError, match=r"deep.tiff: mode \S+, expected 8 bits a channel"):
        read_picture(tmp_path / "deep.tiff", AS_THEY_ARE)


def _deep_png(channels: int) -> bytes:
    """7 x 5 pixels of 16 bits a channel, which PIL does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header, rows = struct.pack(">IIBBBBB", 7, 5, 16, kind, 0, 0, 0), 5 * (b"\0" + 7 * channels * b"\x12\x34")
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_deep_png_files_are_refused_where_pil_would_drop_bits(tmp_path, channels):
    (tmp_path / "deep.png").write_bytes(_deep_png(channels))
    with pytest.raises(ConfigError, match=r"deep.png: mode \S+16\S*, expected 8 bits a channel; convert the file"):
        read_picture(tmp_path / "deep.png", AS_THEY_ARE)


@pytest.mark.parametrize(("greatest", "depth"), [(1023, 2), (255, 1), (15, 1)])
def test_ppm_files_are_refused_by_their_greatest_value(tmp_path, greatest, depth):
    (tmp_path / "a.ppm").write_bytes(b"P6 7 5 %d\n" % greatest + bytes(7 * 5 * 3 * depth))
    if greatest < 256:
        assert read_picture(tmp_path / "a.ppm", AS_THEY_ARE).shape == (3, 5, 7)
        return
    with pytest.raises(ConfigError, match="a.ppm: values up to 1023, expected 8 bits a channel"):
        read_picture(tmp_path / "a.ppm", AS_THEY_ARE)


def test_colours_in_a_grey_set_are_refused(tmp_path):
    write_picture(tmp_path / "a.png", np.random.default_rng(0))
    with pytest.raises(ConfigError, match="a.png: mode RGB, expected grey like the set's other pictures"):
        read_picture(tmp_path / "a.png", ImageForm(True, (7, 5), None))


def test_a_store_reads_any_name_also_from_another_process(tmp_path, seed):
    rng = np.random.default_rng(seed)
    names = ["a b.png", "ü/ж.png", "long" * 20 + ".png"]
    made = [write_picture(tmp_path / name, rng) for name in names]
    store = pickle.loads(pickle.dumps(ImageFiles(tmp_path, names, AS_THEY_ARE)))
    assert len(store) == 3
    for i in (2, 0, 1):
        np.testing.assert_array_equal(store[i].permute(1, 2, 0).numpy(), made[i])


def test_pictures_of_several_frames_give_their_first_one_and_it_is_said(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(image_files, "_said", set())
    first, *others = (Image.new("L", (7, 5), value) for value in (10, 200, 90))
    file = tmp_path / "moving.gif"
    first.save(file, save_all=True, append_images=others)
    assert all((as_read(file) == 10).all() for _ in range(2))
    assert capfd.readouterr().err == f"{file}: the first of its frames is read; likewise of other pictures\n"

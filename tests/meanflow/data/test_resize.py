import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.errors import ConfigError
from fullstride.meanflow.data import catalogue
from fullstride.meanflow.data.catalogue import fit


def _pictures(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("height", "width", "size"), [(28, 28, 32), (7, 5, 8), (9, 4, 9), (6, 6, 6)])
def test_padding_is_numpy_s_with_the_rest_below_and_right(height, width, size, seed):
    images = _pictures(seed, 3, 2, height, width)
    sides = [((size - n) // 2, size - n - (size - n) // 2) for n in (height, width)]
    padded = fit(images, size, "pad")
    assert padded.dtype == torch.uint8
    np.testing.assert_array_equal(padded, np.pad(images, ((0, 0), (0, 0), *sides)))


@pytest.mark.parametrize(("height", "width", "size"), [(28, 28, 32), (32, 32, 13), (17, 29, 11), (5, 9, 24)])
def test_resizing_is_pil_s(height, width, size, seed):
    images = _pictures(seed, 4, 3, height, width)
    found = fit(images, size, "resize")
    assert found.shape == (4, 3, size, size)
    for image, mine in zip(images.flatten(0, 1).numpy(), found.flatten(0, 1).numpy(), strict=True):
        # Of floating pixels: PIL's bytes are clipped between its two passes too.
        known = Image.fromarray(image.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(known).clip(0, 255) - mine).max() <= 0.501


@pytest.mark.parametrize(("height", "width"), [(12, 21), (22, 11), (13, 13)])
@pytest.mark.parametrize("size", [8, 11, 30])
def test_cropping_takes_the_square_in_the_middle(height, width, size, seed):
    images = _pictures(seed, 2, 1, height, width)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    middle = images[..., top : top + side, left : left + side]
    assert torch.equal(fit(images, size, "crop"), fit(middle.contiguous(), size, "resize"))
    assert torch.equal(fit(images, side, "crop"), middle)


def test_a_shrunk_checkerboard_is_grey():
    board = (torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255
    shrunk = fit(board.to(torch.uint8)[None, None], 8, "resize")
    assert (shrunk.int() - 128).abs().max() <= 2


def test_blocks_do_not_show(monkeypatch, seed):
    images = _pictures(seed, 11, 1, 9, 9)
    whole = fit(images, 6, "resize")
    monkeypatch.setattr(catalogue, "BLOCK", 4)
    assert torch.equal(fit(images, 6, "resize"), whole)


@pytest.mark.parametrize(
    ("size", "how", "reason"),
    [
        (24, "pad", "data.image_size=24: the pictures are 20x28, which data.fit=pad cannot shrink; set data.fit=crop"),
        (0, "resize", "data.image_size=0: expected a number of pixels"),
        (32, "padd", "data.fit=padd: expected one of pad, .*did you mean pad"),
    ],
)
def test_impossible_settings_are_refused(size, how, reason):
    with pytest.raises(ConfigError, match=reason):
        fit(_pictures(0, 1, 1, 20, 28), size, how)

import math
import sys

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.meanflow.sampling.grids import GAP, MARGIN, MIN_TILE, TITLE, save_comparison, save_grid, save_loss_curve


def random_images(seed, n, c=1, h=8, w=8):
    return torch.rand((n, c, h, w), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def read(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def shown(image, scale):
    """The pixels a viewer must see: -1 black, 1 white, each a square of `scale` pixels."""
    pixels = ((image.double() + 1) * 127.5).clamp(0, 255).round().byte().permute(1, 2, 0).expand(-1, -1, 3)
    return pixels.numpy().repeat(scale, 0).repeat(scale, 1)


def assert_tiles(picture, images, columns, left, top, scale):
    for i, image in enumerate(images):
        expected = shown(image, scale)
        h, w, _ = expected.shape
        y, x = top + i // columns * (h + GAP), left + i % columns * (w + GAP)
        difference = picture[y : y + h, x : x + w].astype(int) - expected
        assert np.abs(difference).max() <= 1, f"image {i} at ({x}, {y})"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("n", "c", "h", "w", "columns", "scale"),
    [(7, 1, 8, 8, 3, 6), (5, 3, 5, 9, 5, 6), (1, 3, 32, 32, 1, 2), (3, 1, 50, 41, 8, 1)],
)
def test_a_grid_shows_every_pixel(tmp_path, seed, n, c, h, w, columns, scale):
    images = random_images(seed, n, c, h, w)
    assert scale == math.ceil(MIN_TILE / max(h, w))
    save_grid(images, tmp_path / "grid.png", columns=columns)
    picture = read(tmp_path / "grid.png")
    across, down = min(columns, n), math.ceil(n / columns)
    assert picture.shape == (
        2 * MARGIN + down * (h * scale + GAP) - GAP,
        2 * MARGIN + across * (w * scale + GAP) - GAP,
        3,
    )
    assert_tiles(picture, images, columns, MARGIN, MARGIN, scale)
    assert (picture[:MARGIN] == 255).all()
    assert (picture[:, :MARGIN] == 255).all()
    assert (picture[-MARGIN:] == 255).all()


def test_values_beyond_the_range_are_shown_as_its_ends(tmp_path):
    images = torch.tensor([-7.0, -1.0, 0.0, 1.0, 1.5]).view(1, 1, 1, 5)
    save_grid(images, tmp_path / "grid.png", columns=1)
    row = read(tmp_path / "grid.png")[MARGIN + 1, MARGIN:-MARGIN, 0]
    assert row[::10].tolist() == [0, 0, 128, 255, 255]


def test_captions_stand_left_of_their_rows_and_leave_the_images_alone(tmp_path):
    images = random_images(3, 8)
    save_grid(images, tmp_path / "plain.png", columns=3)
    save_grid(images, tmp_path / "grid.png", columns=3, row_captions=["one step", "", "Euler, 50 steps"])
    plain, picture = read(tmp_path / "plain.png"), read(tmp_path / "grid.png")
    left = picture.shape[1] - plain.shape[1]
    assert picture.shape[0] == plain.shape[0]
    assert (picture[:, left:][:, MARGIN:] == plain[:, MARGIN:]).all()
    margin = picture[:, : left + MARGIN]
    dark = [(margin[MARGIN + 52 * row : MARGIN + 52 * row + 48] < 128).any() for row in range(3)]
    assert dark == [True, False, True]
    assert (picture[:, : MARGIN // 2] == 255).all(), "a caption is cut off"


@pytest.mark.parametrize("n", [1, 9, 10])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_comparison_shows_both_halves(tmp_path, n, channels):
    generated, real = random_images(0, n, channels), random_images(1, n, channels)
    save_comparison(generated, real, tmp_path / "both.png")
    picture = read(tmp_path / "both.png")
    columns = math.ceil(math.sqrt(n))
    second = (picture.shape[1] + 2 * MARGIN) // 2
    assert_tiles(picture, generated, columns, MARGIN, MARGIN + TITLE, 6)
    assert_tiles(picture, real, columns, second, MARGIN + TITLE, 6)
    titles = picture[: MARGIN + TITLE]
    assert (titles[:, :second] < 128).any()
    assert (titles[:, second:] < 128).any()
    assert (titles[:, second - MARGIN : second - 2] == 255).all(), "the titles run into each other"
    if columns > 3:  # the grids, not the titles, decide the width
        assert picture.shape == (
            2 * MARGIN + TITLE + 52 * math.ceil(n / columns) - GAP,
            4 * MARGIN + 2 * (52 * columns - GAP),
            3,
        )


def test_both_halves_of_a_comparison_have_the_captions_of_their_rows(tmp_path):
    generated, real = random_images(2, 15), random_images(3, 15)
    save_comparison(generated, real, tmp_path / "both.png", titles=("a", "b"), row_captions=["zero", "", "two", "3"])
    picture = read(tmp_path / "both.png")
    top, grid = MARGIN + TITLE, 52 * 4 - GAP
    left = (picture.shape[1] - 4 * MARGIN) // 2 - grid
    second = picture.shape[1] - MARGIN - grid
    assert left > 20
    assert_tiles(picture, generated, 4, MARGIN + left, top, 6)
    assert_tiles(picture, real, 4, second, top, 6)
    for end in (MARGIN + left, second):
        margin = picture[:, end - left : end]
        assert [(margin[top + 52 * row : top + 52 * row + 48] < 128).any() for row in range(4)] == [1, 0, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 39, 400])
def test_a_loss_curve_is_drawn_where_the_values_are(tmp_path, count):
    steps = np.arange(count) * 10
    save_loss_curve(steps.tolist(), (2.0 - steps / max(1, steps.max())).tolist(), tmp_path / "loss.png")
    picture = read(tmp_path / "loss.png").astype(int)
    assert picture.shape == (675, 1200, 3)
    blue = picture[:, :, 2] - picture[:, :, 0] > 60
    assert blue.any()
    if count > 1:
        height = [np.nonzero(blue[:, x])[0].mean() for x in range(1200) if blue[:, x].any()]
        assert len(height) > 1000
        # Falling values: the curve goes down the picture, whose rows count from the top, in a straight line.
        assert np.corrcoef(height, np.arange(len(height)))[0, 1] > 0.99
        assert height[-1] - height[0] > 300


def test_a_loss_over_decades_is_logarithmic(tmp_path):
    steps = np.arange(30)
    save_loss_curve(steps.tolist(), (10.0 ** (-steps / 10)).tolist(), tmp_path / "loss.png")
    picture = read(tmp_path / "loss.png").astype(int)
    blue = picture[:, :, 2] - picture[:, :, 0] > 60
    height = [np.nonzero(blue[:, x])[0].mean() for x in range(1200) if blue[:, x].any()]
    straight = np.polyval(np.polyfit(np.arange(len(height)), height, 1), np.arange(len(height)))
    assert np.abs(straight - height).max() < 5


def test_folders_are_made_and_no_global_state_is_left(tmp_path):
    def settings():
        # Reading the backend would choose one, and import pyplot.
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before, had_pyplot = settings(), "matplotlib.pyplot" in sys.modules
    save_grid(random_images(0, 1), tmp_path / "a" / "b" / "grid.png", columns=1)
    save_loss_curve([1, 2], [0.0, -1.0], tmp_path / "c" / "loss.png")
    assert read(tmp_path / "a" / "b" / "grid.png").any()
    assert settings() == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_images_that_are_not_finite_are_named(tmp_path, bad):
    images = random_images(0, 6)
    images[4, 0, 3, 2] = bad
    with pytest.raises(ValueError, match=r"images \[4\] of 6 are not finite"):
        save_grid(images, tmp_path / "grid.png", columns=2)
    with pytest.raises(ValueError, match=r"images \[4\] of 6 are not finite"):
        save_comparison(random_images(0, 6), images, tmp_path / "grid.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("n", "channels", "changes", "message"),
    [
        (0, 1, {}, r"images have shape \(0, 1, 8, 8\)"),
        (2, 2, {}, r"images have shape \(2, 2, 8, 8\), expected \(n, 1, h, w\) or \(n, 3, h, w\)"),
        (4, 1, {"columns": 0}, "columns is 0, expected at least 1"),
        (5, 1, {"row_captions": ["a", "b"]}, "row_captions has 2 entries, expected one for each of the 3 rows"),
        (5, 1, {"row_captions": []}, "row_captions has 0 entries"),
    ],
)
def test_impossible_grids_are_refused(tmp_path, n, channels, changes, message):
    with pytest.raises(ValueError, match=message):
        save_grid(random_images(0, n, channels), tmp_path / "grid.png", **({"columns": 2} | changes))


def test_a_comparison_needs_as_many_of_each(tmp_path):
    with pytest.raises(ValueError, match=r"generated has shape \(4, 1, 8, 8\) and real \(5, 1, 8, 8\)"):
        save_comparison(random_images(0, 4), random_images(0, 5), tmp_path / "both.png")
    with pytest.raises(ValueError, match="row_captions has 3 entries, expected one for each of the 2 rows"):
        save_comparison(random_images(0, 4), random_images(1, 4), tmp_path / "both.png", row_captions=["", "a", "b"])


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        ([], [], "there are 0 steps and 0 values"),
        ([1, 2], [0.5], "there are 2 steps and 1 values"),
        ([10, 20, 30], [0.5, math.nan, math.inf], "the value at step 20 is nan"),
        ([10, 20], [0.5, math.inf], "the value at step 20 is inf"),
    ],
)
def test_impossible_curves_are_refused(tmp_path, steps, values, message):
    with pytest.raises(ValueError, match=message):
        save_loss_curve(steps, values, tmp_path / "loss.png")

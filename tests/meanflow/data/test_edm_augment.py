import dataclasses
import math

import pytest
import torch

from fullstride.meanflow.data.edm_augment import SYM6, AugmentDraw, EdmAugment
from tests.meanflow.models.py_meanflow_checkpoint import formula


def pictures(seed: int, n: int = 5, size: tuple[int, int] = (12, 15)) -> torch.Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(seed))


def smooth(n: int = 3, size: int = 32) -> torch.Tensor:
    """Pictures of a few low frequencies, which resampling must keep almost exactly."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return torch.stack([torch.cos(0.19 * x + i) * torch.sin(0.14 * y - i) for i in range(n)])[:, None]


def nothing(n: int, **changes: torch.Tensor) -> AugmentDraw:
    zero = torch.zeros(n)
    return dataclasses.replace(AugmentDraw(zero, zero, zero, zero, torch.zeros(2, n)), **changes)


def test_the_filter_is_an_orthogonal_wavelets():
    """Sum sqrt 2 and orthonormal to its even shifts (Daubechies, Ten Lectures on Wavelets, section 5.1)."""
    taps = torch.tensor(SYM6, dtype=torch.float64)
    assert taps.sum().item() == pytest.approx(math.sqrt(2), abs=1e-9)
    for shift in range(0, 12, 2):
        assert (taps[shift:] * taps[: 12 - shift]).sum().item() == pytest.approx(float(shift == 0), abs=1e-9)


def test_with_probability_zero_nothing_happens(seed):
    x = pictures(seed)
    got, labels = EdmAugment(0.0, mirror=0.0)(x, torch.Generator().manual_seed(seed))
    assert torch.equal(got, x)
    assert torch.equal(labels, torch.zeros(5, 6))


def test_pictures_that_are_only_mirrored_are_mirrored_exactly(seed):
    x = pictures(seed, 64)
    got, labels = EdmAugment(0.0)(x, torch.Generator().manual_seed(seed))
    flipped = labels[:, 0] > 0
    assert 10 < flipped.sum() < 54
    assert torch.equal(got[flipped], x[flipped].flip(-1))
    assert torch.equal(got[~flipped], x[~flipped])
    assert not labels[:, 1:].any()


# Every 41st number of what EDM's pipe, as py-meanflow has it, makes of these pictures with these draws, its filter
# carried to fp64 like the rest; and all of its labels.
PUBLISHED = [0.1441129208, 0.4341222626, 0.3872369378, -0.9581778845, -0.0898590324, 0.3201392576, 0.1762242072]
PUBLISHED += [0.323952392, 0.238737485, -0.6580191344, 0.8340943871, 0.5085000004, -0.3766503486]
PUBLISHED_LABELS = [
    [1.0, 0.7, 0.0, 0.0, 0.5, -0.25],
    [0.0, -1.2, -0.454361, 0.776888, -1.3, 0.8],
    [0.0, 0.0, -1.238003, 0.846964, 0.0, 0.4],
]


def test_it_does_what_edms_own_does_with_the_same_draws():
    def fp64(*values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    shift = fp64([0.5, -1.3, 0.0], [-0.25, 0.8, 0.4])
    draw = AugmentDraw(fp64(1, 0, 0), fp64(0.7, -1.2, 0), fp64(0, 0.9, -1.5), fp64(0, 2.1, -0.6), shift)
    got = EdmAugment().apply(formula("x", (3, 2, 11, 8)) * 2.5, draw)
    torch.testing.assert_close(got.flatten()[::41], fp64(*PUBLISHED), rtol=0, atol=1e-9)
    torch.testing.assert_close(draw.labels(), fp64(*PUBLISHED_LABELS), rtol=0, atol=1e-6)


def test_a_picture_does_not_see_its_batch(seed):
    x, g = pictures(seed, 7, (9, 9)).double(), torch.Generator().manual_seed(seed)
    draw = EdmAugment(1.0).draw(7, torch.device("cpu"), g)
    one = AugmentDraw(*(getattr(draw, field.name)[..., 2:3] for field in dataclasses.fields(AugmentDraw)))
    torch.testing.assert_close(EdmAugment().apply(x, draw)[2:3], EdmAugment().apply(x[2:3], one))


def test_what_lies_beyond_the_border_is_mirrored():
    """Half a period of a cosine goes on as the whole one, in the middle of the picture and at its borders."""
    size = 16
    place = torch.arange(size, dtype=torch.float64)
    x = torch.cos(math.pi * place / (size - 1))[:, None].expand(1, 1, size, size)  # its own reflection
    zero = torch.zeros(1, dtype=torch.float64)
    shift = torch.tensor([[0.0], [2.0]], dtype=torch.float64)  # a quarter of the height downwards
    got = EdmAugment().apply(x, AugmentDraw(zero, zero, zero, zero, shift))[0, 0]
    expected = torch.cos(math.pi * (place - 4) / (size - 1))[:, None].expand(size, size)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.01)


def test_a_whole_translation_moves_pixels(seed):
    """A shift by whole pixels of a smooth picture, compared with the picture's own formula there."""
    x = smooth()
    shift = torch.tensor([[0.5, -0.25, 0.0], [0.25, 0.5, -0.5]])  # in eighths of 32: pixels x 4
    got = EdmAugment().apply(x, nothing(3, shift=shift))
    for i in range(3):
        dx, dy = int(4 * shift[0, i]), int(4 * shift[1, i])
        moved = torch.roll(x[i], (dy, dx), (1, 2))
        torch.testing.assert_close(got[i][:, 8:-8, 8:-8], moved[:, 8:-8, 8:-8], rtol=0, atol=0.02)


def test_scaling_and_stretching_read_the_picture_where_they_should():
    """The centre stays; a pixel at c + d shows what was at c + A d, here of a linear picture, exactly linear again."""
    size, c = 33, 16
    y, x = torch.meshgrid(torch.arange(size) - c, torch.arange(size) - c, indexing="ij")
    ramp = (0.03 * x + 0.05 * y)[None, None].float()
    for scale, stretch, angle in ((1.0, 0.0, 0.0), (0.0, 1.5, 0.0), (-0.5, 1.0, 0.7), (0.3, -2.0, 2.5)):
        draw = nothing(1, scale=torch.tensor([scale]), stretch=torch.tensor([stretch]), angle=torch.tensor([angle]))
        got = EdmAugment().apply(ramp, draw)[0, 0]
        s, a = 2 ** (0.2 * scale), 2 ** (0.2 * stretch)
        co, si = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[co, si], [-si, co]])
        matrix = turn @ torch.diag(torch.tensor([1 / a, a])) @ turn.T / s
        source = matrix @ torch.stack([x, y]).flatten(1).float()
        expected = (0.03 * source[0] + 0.05 * source[1]).view(size, size)
        torch.testing.assert_close(got[10:-10, 10:-10], expected[10:-10, 10:-10], rtol=0, atol=5e-3)


def test_a_constant_picture_stays_constant_whatever_is_done(seed):
    x = torch.full((64, 3, 20, 20), 0.7)
    got, labels = EdmAugment(1.0)(x, torch.Generator().manual_seed(seed))
    assert labels[:, 1].abs().min() > 0
    far = labels[:, 4:].abs().max(1).values > 2.5  # a translation beyond one reflection shows what is outside
    # The resampling of a constant ripples by the wavelet's own 0.3 %.
    torch.testing.assert_close(got[~far], x[~far], rtol=0, atol=5e-3)


def test_labels_say_what_was_drawn(seed):
    augment = EdmAugment(0.5)
    draw = augment.draw(40, torch.device("cpu"), torch.Generator().manual_seed(seed))
    labels = draw.labels()
    assert labels.shape == (40, augment.dim)
    assert torch.equal(labels[:, 1], draw.scale)
    torch.testing.assert_close(labels[:, 2:4].norm(dim=1), draw.stretch.abs())
    assert torch.equal(labels[:, 4:], draw.shift.T)


def test_each_operation_happens_with_its_probability_and_spread():
    draw = EdmAugment(0.12).draw(40_000, torch.device("cpu"), torch.Generator().manual_seed(0))
    for values in (draw.scale, draw.stretch, draw.shift[0]):
        done = values != 0
        assert done.double().mean().item() == pytest.approx(0.12, abs=0.01)
        assert values[done].std().item() == pytest.approx(1.0, abs=0.05)
    assert draw.flip.mean().item() == pytest.approx(0.5, abs=0.01)
    assert (draw.angle != 0).double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert ((draw.shift[0] != 0) == (draw.shift[1] != 0)).all()


def test_the_generator_decides(seed):
    x = pictures(seed)
    a, b, c = (EdmAugment(0.9)(x, torch.Generator().manual_seed(s)) for s in (seed, seed, seed + 1))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])


def test_a_probability_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"p is 1.2, expected a probability in \[0, 1\]"):
        EdmAugment(1.2)
    with pytest.raises(ValueError, match="mirror is -0.1"):
        EdmAugment(mirror=-0.1)

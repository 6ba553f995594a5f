import torch

from fullstride.meanflow.training.step import random_hflip


def test_half_of_the_images_are_mirrored_and_nothing_else(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2001, 3, 2, 5, generator=generator)
    got = random_hflip(x, generator)
    same, mirrored = ((got == y).flatten(1).all(1) for y in (x, x.flip(3)))
    assert (same ^ mirrored).all()
    assert abs(mirrored.float().mean() - 0.5) < 5 * 0.5 / 2001**0.5


def test_the_generator_decides(seed):
    x = torch.randint(0, 256, (64, 1, 1, 3), dtype=torch.uint8)
    a, b, c = (random_hflip(x, torch.Generator().manual_seed(s)) for s in (seed, seed, seed + 1))
    assert a.dtype == torch.uint8
    assert torch.equal(a, b)
    assert not torch.equal(a, c)

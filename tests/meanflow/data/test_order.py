import itertools

import pytest
import torch

from fullstride.meanflow.data.order import epoch_order, mirror_half


def order(**changed):
    return epoch_order(**({"n": 101, "steps": 4, "micro_batches": 3, "batch_size": 7, "seed": 5, "epoch": 2} | changed))


def test_every_record_comes_at_most_once(seed):
    got = order(seed=seed)
    assert got.shape == (4, 3, 7)
    assert got.unique().numel() == 84
    assert got.min() >= 0
    assert got.max() < 101
    assert not torch.equal(got.flatten(), got.flatten().sort().values)


def test_it_is_a_function_of_seed_epoch_and_attempt(seed):
    """Attempts above 2^32 apart as well: torch's generator takes the low 32 bits of its seed alone."""
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    drawn = [
        order(seed=s, epoch=e, attempt=a) for s, e, a in itertools.product((seed, seed + 1), (0, 1, 9), (0, 1, 2, 3))
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert torch.equal(drawn[0], order(seed=seed, epoch=0, attempt=0))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_attempt_is_the_order_of_published_runs(seed):
    generator = torch.Generator().manual_seed(seed * 1_000_003 + 2)
    assert torch.equal(order(seed=seed).flatten(), torch.randperm(101, generator=generator)[:84])


def test_fewer_steps_are_the_first_of_more():
    assert torch.equal(order(steps=2), order(steps=4)[:2])


@pytest.mark.parametrize("changed", [{"steps": 5}, {"steps": 0}, {"n": 83}])
def test_too_few_records_are_refused(changed):
    with pytest.raises(ValueError, match="steps of 3 x 7 records are .*, expected 1 to"):
        order(**changed)


def test_half_of_an_order_is_mirrored(seed):
    made = epoch_order(3000, steps=30, micro_batches=1, batch_size=100, seed=seed, epoch=0)
    got = mirror_half(made, 3000, seed=seed, epoch=0)
    assert torch.equal(got % 3000, made)
    assert abs((got >= 3000).float().mean() - 0.5) < 5 * 0.5 / 3000**0.5
    assert torch.equal(got, mirror_half(made, 3000, seed=seed, epoch=0))
    for changed in ({"epoch": 1}, {"seed": seed + 1}, {"attempt": 1}):
        assert not torch.equal(got, mirror_half(made, 3000, **({"seed": seed, "epoch": 0} | changed)))

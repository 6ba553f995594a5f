import numpy as np
import pytest
import torch
from scipy import stats

from fullstride.meanflow.sampling import noise as module
from fullstride.meanflow.sampling.noise import LABELS, NOISE, _Streams, seeded_labels, seeded_noise

REFERENCE = [0.019624507054686546, -0.6034775376319885, 0.35885366797447205, 1.8450409173965454]
SEEDS = [0, 7, 2**63 + 11]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [(13,), (1, 12), (5, 5, 3), (1,) * 13])
def test_images_do_not_depend_on_how_they_are_batched(seed, parts):
    whole = seeded_noise(seed, 4, 13, (3, 5, 7))
    pieces, start = [], 4
    for count in parts:
        pieces.append(seeded_noise(seed, start, count, (3, 5, 7)))
        start += count
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", [2, 5, 40])
def test_threads_draw_what_one_draws(seed, threads, monkeypatch):
    alone = seeded_noise(seed, 7, 11, (3, 5, 7))
    monkeypatch.setattr(module, "SHARE", 1)
    monkeypatch.setattr(module, "cores_each", lambda: threads)
    monkeypatch.setattr(torch, "empty", lambda size, **_: torch.full(size, float("nan")))
    assert torch.equal(seeded_noise(seed, 7, 11, (3, 5, 7)), alone)
    assert seeded_noise(seed, 7, 0, (3, 5, 7)).shape == (0, 3, 5, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_standard_normal(seed):
    noise = seeded_noise(seed, 0, 300, (3, 6, 5))
    assert noise.dtype == torch.float32
    assert noise.shape == (300, 3, 6, 5)
    assert stats.kstest(noise.double().flatten().numpy(), "norm").pvalue > 1e-4
    across_images = noise.flatten(1).double().mean(0) * 300**0.5
    assert stats.kstest(across_images.numpy(), "norm").pvalue > 1e-4


def test_no_two_images_or_seeds_share_their_noise():
    draws = torch.cat([seeded_noise(seed, 0, 2000, (1, 2, 2)) for seed in (0, 1, 2**32, 2**32 + 1)])
    assert len(draws.flatten(1).unique(dim=0)) == len(draws)
    a, b = (seeded_noise(seed, 0, 50, (1, 20, 20)).double().flatten() for seed in (3, 4))
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / len(a) ** 0.5


def test_labels_draw_from_streams_of_their_own():
    noise, labels = (_Streams(kind, 3).at(0).integers(2**63, size=100) for kind in (NOISE, LABELS))
    assert not set(noise) & set(labels)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_is_the_philox_of_its_key_and_counter(seed):
    """Whatever was drawn before, half a number of 64 bits included."""
    for kind in (NOISE, LABELS):
        streams = _Streams(kind, seed)
        for index in (0, 5, 2**63, 1, 5):
            right = np.random.Generator(np.random.Philox(key=seed, counter=kind << 192 | index << 128))
            drawn = streams.at(index)
            for take in (
                lambda g: g.standard_normal(7, dtype=np.float32),
                lambda g: g.integers(9, size=3, dtype=np.uint32),
                lambda g: g.permutation(11),
            ):
                assert np.array_equal(take(drawn), take(right))


def test_the_same_numbers_on_every_machine():
    noise = seeded_noise(1, 2, 1, (1, 2, 2)).flatten()
    assert noise.tolist() == pytest.approx(REFERENCE, abs=0)


def test_noise_does_not_touch_the_global_generator():
    before = torch.get_rng_state()
    seeded_noise(0, 0, 3, (1, 4, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_range_is_empty():
    assert seeded_noise(0, 5, 0, (1, 4, 4)).shape == (0, 1, 4, 4)
    assert seeded_labels(0, 5, 0, 3).shape == (0,)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_classes", [1, 3, 10])
def test_labels_do_not_depend_on_how_they_are_batched(seed, num_classes):
    whole = seeded_labels(seed, 0, 47, num_classes)
    pieces = [seeded_labels(seed, start, min(5, 47 - start), num_classes) for start in range(0, 47, 5)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(seeded_labels(seed, 17, 9, num_classes), whole[17:26])


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_are_balanced_in_every_round(seed):
    labels = seeded_labels(seed, 0, 70, 7)
    assert labels.dtype == torch.int64
    assert torch.equal(labels.view(10, 7).sort(dim=1).values, torch.arange(7).expand(10, 7))


def test_labels_have_an_order_of_their_own_in_each_round_and_seed():
    orders = torch.cat([seeded_labels(seed, 0, 200, 10).view(20, 10) for seed in SEEDS])
    assert len(orders.unique(dim=0)) == len(orders)


@pytest.mark.parametrize(
    ("seed", "start", "count", "message"),
    [
        (-1, 0, 2, r"seed is -1, expected an integer in \[0, 2\*\*64\)"),
        (2**64, 0, 2, "seed is 18446744073709551616"),
        (0, -3, 2, "start is -3"),
        (0, 0, -2, "count -2"),
    ],
)
def test_impossible_ranges_are_refused(seed, start, count, message):
    with pytest.raises(ValueError, match=message):
        seeded_noise(seed, start, count, (1, 2, 2))
    with pytest.raises(ValueError, match=message):
        seeded_labels(seed, start, count, 10)


def test_labels_need_a_class():
    with pytest.raises(ValueError, match="num_classes is 0, expected at least 1"):
        seeded_labels(0, 0, 2, 0)

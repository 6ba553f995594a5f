"""Draws of tokens beside fp64's softmax, and at the edges."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from fullstride.llm.kernels.xla import sampling as plain_sampling
from fullstride.llm.kernels.xla.sampling import BLOCK, drawn, race, random_words, sample
from tests.llm.kernels.xla.test_sampling import kept_by, make

LAST = 2**32 - 1


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def keys(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)


@jax.jit
def step(scores, s):
    return sample(scores, s, 1).token


def draws(rng: np.random.Generator, logits: np.ndarray, count: int, **wishes) -> np.ndarray:
    """Draw tokens from one row's logits: half with a key per row, half with one key at many positions."""
    rows, size = count // 16, logits.size
    scores = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
    given = {name: np.full(rows, value) for name, value in wishes.items()}
    some = [step(scores, make(rows, size, key=keys(rng, rows), **given)) for _ in range(8)]
    one, starts = np.tile(keys(rng, 1), (rows, 1)), range(0, count // 2, rows)
    return np.concatenate(
        [*some, *(step(scores, make(rows, size, key=one, position=i + np.arange(rows), **given)) for i in starts)]
    )


def follows(tokens: np.ndarray, shares: np.ndarray, bins: np.ndarray) -> bool:
    """Chi-square of bins of tokens; those with fewer than five expected are one."""
    expected = np.bincount(bins, shares) * tokens.size
    counts = np.bincount(bins[tokens], minlength=expected.size)
    rare = expected < 5
    expected, counts = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return some.sum() == 1 or stats.chisquare(counts[some], expected[some]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("size", "spread", "temperature", "count"),
    [(7, 1, 1.3, 4096), (128, 0, 1.0, 4096), (129, 6, 0.8, 4096), (50_257, 1.5, 0.9, 2048)],
)
def test_draws_follow_the_softmax(rng, size, spread, temperature, count):
    logits = (spread * rng.standard_normal(size)).astype(np.float32)
    shares = special.softmax(logits.astype(np.float64) / temperature)
    tokens = draws(rng, logits, count, temperature=temperature)
    ids = np.arange(size)
    # Tokens, blocks, places in a block, and tokens as frequent as one another.
    ranks = np.empty(size, int)
    ranks[np.argsort(-shares)] = ids
    alike = np.floor(30 * np.cumsum(-np.sort(-shares)))[ranks].astype(int)
    assert all(follows(tokens, shares, bins) for bins in (ids, ids // BLOCK, ids % BLOCK, alike))


@pytest.mark.parametrize("wishes", [{"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}])
def test_draws_follow_what_the_filters_leave(rng, wishes):
    logits = (2 * rng.standard_normal(1003)).astype(np.float32)
    scaled = (logits / np.float32(0.8)).astype(np.float64)
    kept = kept_by(scaled, *({"top_k": 0, "top_p": 1, "min_p": 0} | wishes).values())
    tokens = draws(rng, logits, 4096, temperature=0.8, **wishes)
    assert kept[tokens].all()
    assert follows(tokens, special.softmax(np.where(kept, scaled, -np.inf)), np.arange(logits.size))


def test_a_race_is_what_fp64_says():
    words = np.concatenate([np.arange(9), np.geomspace(9, LAST, 900).astype(np.uint32), LAST - np.arange(9)])
    found = np.asarray(race(jnp.full((1, words.size), 3.0), jnp.asarray(words, jnp.uint32)[None]))[0]
    expected = 3 / -np.log1p(-(words.astype(np.float64) + 0.5) / 2**32)
    early = words < 0.99 * 2**32
    np.testing.assert_allclose(found[early], expected[early], rtol=1e-6)
    # The latest times are cut off where fp32's numbers below 1 end, at e^-16.6 of all.
    np.testing.assert_allclose(found, np.maximum(expected, 3 / np.log(2**24)), rtol=3e-2)


def test_a_weight_of_zero_never_wins(rng):
    words = np.asarray(list(product([0, 1, 2**31, LAST], repeat=5)), np.uint32)
    weights = np.where(rng.random(words.shape) < 0.6, 0, 10.0 ** rng.uniform(-37, 2, words.shape)).astype(np.float32)
    weights[np.arange(len(words)), rng.integers(0, 5, len(words))] = 1
    found = np.asarray(race(jnp.asarray(weights), jnp.asarray(words)))
    assert np.isfinite(found).all()
    assert (weights[np.arange(len(words)), found.argmax(-1)] > 0).all()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        *((3 * BLOCK + 5, words) for words in ((0, 0), (LAST, LAST), (0, LAST), (LAST, 0))),
        *((size, (word, word)) for size in (7, BLOCK, 3 * BLOCK) for word in (0, LAST)),
    ],
)
def test_the_only_tokens_left_are_drawn_at_any_random_number(monkeypatch, rng, size, words):
    """At both ends of blocks and of the vocabulary; blocks before and after have no mass."""
    ends = sorted({place % size for block in range(0, size, BLOCK) for place in (block - 1, block)})
    logits = np.full((len(ends), size), -np.inf, np.float32)
    logits[np.arange(len(ends)), ends] = 100 * rng.standard_normal(len(ends))
    forced = lambda key, position, count: jnp.tile(jnp.asarray(words, jnp.uint32), (len(ends), count))[:, :count]  # noqa: E731
    monkeypatch.setattr(plain_sampling, "random_words", forced)
    assert drawn(jnp.asarray(logits), make(len(ends), temperature=np.full(len(ends), 0.7))).tolist() == ends
    # Two of them: one or the other.
    both = np.where(np.isfinite(logits), logits, np.roll(logits, 1, 0))
    found = np.asarray(drawn(jnp.asarray(both), make(len(ends), temperature=np.full(len(ends), 1e30))))
    assert np.isfinite(both[np.arange(len(ends)), found]).all()


def test_tokens_of_a_block_of_next_to_no_mass_have_weights(monkeypatch):
    """Those beside the row's largest would be zero; here the last number above zero wins."""
    logits = np.full((1, 3 * BLOCK), -np.inf, np.float32)
    logits[0, [5, 2 * BLOCK + 9, 2 * BLOCK + 20]] = 0, -86, -120
    monkeypatch.setattr(
        plain_sampling, "race", lambda weights, _: jnp.where(weights > 0, jnp.arange(weights.size)[None], -1)
    )
    assert drawn(jnp.asarray(logits), make(1, temperature=np.ones(1))).tolist() == [2 * BLOCK + 20]


def test_rows_of_any_temperature_share_a_step(rng):
    """Greedy ones are the argmax, the lowest of equals; the coldest and the hottest draw without overflow."""
    logits = (3 * rng.standard_normal((6, 1003))).astype(np.float32)
    logits[1, [300, 9, 1002]] = 77
    logits[2:4] *= 1e38 / np.abs(logits[2:4]).max(-1, keepdims=True)
    logits[5, ::2] = -np.inf
    for temperature in ([0] * 6, [0, 0, 0, 1e-5, 1e-5, 1e30], [1e30, 0, 0, 1e-5, 0, 1e30]):
        s = make(6, 1003, temperature=np.asarray(temperature, float), key=keys(rng, 6))
        tokens = np.asarray(drawn(jnp.asarray(logits), s))
        cold = np.asarray(temperature) < 1
        np.testing.assert_array_equal(tokens[cold], logits.argmax(-1)[cold])
        assert np.isfinite(logits[np.arange(6), tokens]).all()


drawing, asking = jax.jit(drawn), jax.jit(sample, static_argnums=2)


@pytest.mark.parametrize("size", [1003, pytest.param(50_257, marks=pytest.mark.thorough)])
def test_a_row_gets_the_same_token_in_any_company(rng, size):
    logits, hot = rng.standard_normal((64, size)).astype(np.float32), np.where(rng.random(64) < 0.8, 0.9, 0)
    given = {"key": keys(rng, 64), "temperature": hot, "position": rng.integers(0, 9999, 64)}
    together = np.asarray(drawing(jnp.asarray(logits), make(64, size, **given)))
    for some in ([0], rng.permutation(64)[:33]):
        own = make(len(some), size, **{name: value[some] for name, value in given.items()})
        np.testing.assert_array_equal(drawing(jnp.asarray(logits[some]), own), together[some])
    # Others ask for more: the program has conditions.
    asked = make(64, size, **given, top_k=np.arange(64) % 2 * 3, wanted=np.arange(64) % 4 == 1)
    np.testing.assert_array_equal(asking(logits, asked, 3).token[::2], together[::2])


def test_random_words_are_of_the_row_alone(rng):
    own = jnp.asarray(keys(rng, 5))
    together = random_words(own, jnp.arange(5), 131)
    alone = jnp.concatenate([random_words(own[i : i + 1], jnp.asarray([i]), 131) for i in range(5)])
    np.testing.assert_array_equal(together, alone)
    assert not np.array_equal(together[0], random_words(own[:1], jnp.asarray([7]), 131)[0])
    assert len(set(np.asarray(together).ravel().tolist())) > 650

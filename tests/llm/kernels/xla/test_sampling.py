import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from fullstride.llm.kernels.interface import Sampler
from fullstride.llm.kernels.xla.sampling import PROMPT, adjusted, filtered, sample, score

V = 131


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def make(rows: int, size: int = V, **given) -> Sampler:
    """A sampler of `size` tokens that does nothing but what is given."""
    words = -(-size // 32)
    settings = {
        "position": np.arange(rows) + 5,
        "key": np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2),
        "temperature": np.zeros(rows),
        "top_k": np.zeros(rows, int),
        "top_p": np.ones(rows),
        "min_p": np.zeros(rows),
        "special": np.zeros(rows, bool),
        "repetition": np.ones(rows),
        "presence": np.zeros(rows),
        "frequency": np.zeros(rows),
        "stops": np.full((rows, 3), -1),
        "min_until": np.zeros(rows, int),
        "slots": np.arange(rows)[::-1],
        "counts": np.zeros((rows, size), int),
        "bias_ids": np.full((rows, 4), -1),
        "bias": np.zeros((rows, 4)),
        "masked": np.zeros(rows, bool),
        "masks": np.zeros((rows, words), np.uint32),
        "wanted": np.zeros(rows, bool),
    } | given
    kinds = {"f": jnp.float32, "i": jnp.int32, "u": jnp.uint32, "b": jnp.bool_}
    return Sampler(**{name: jnp.asarray(x, kinds[np.asarray(x).dtype.kind]) for name, x in settings.items()})


def test_greedy_takes_the_lowest_of_equals(rng):
    logits = rng.standard_normal((3, V)).astype(np.float32)
    logits[1, [7, 90]] = 9
    found = sample(jnp.asarray(logits), make(3), 5)
    assert found.token.tolist() == logits.argmax(-1).tolist()
    assert found.token[1] == 7
    assert not found.top_logprobs.any()


def kept_by(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """By sorting, in fp64."""
    order = np.argsort(-logits)
    kept = np.zeros(logits.size, bool)
    kept[order[: top_k or logits.size]] = True
    shares = special.softmax(np.where(kept, logits.astype(np.float64), -np.inf))
    before = np.cumsum(shares[order]) - shares[order]
    kept[order] &= before < top_p
    return kept & (special.softmax(logits) >= min_p * special.softmax(logits).max())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1, 0), (0, 0.7, 0), (0, 1, 0.2), (9, 0.6, 0.05), (1, 0.01, 0), (V + 9, 0.999, 0)]
)
def test_filters_keep_what_sorting_keeps(rng, top_k, top_p, min_p):
    logits = 2 * rng.standard_normal((4, V)).astype(np.float32)
    found = filtered(jnp.asarray(logits), make(4, top_k=[top_k] * 4, top_p=[top_p] * 4, min_p=[min_p] * 4))
    for row, got in zip(logits, np.asarray(found), strict=True):
        kept = kept_by(row, top_k, top_p, min_p)
        np.testing.assert_array_equal(np.isfinite(got), kept)
        np.testing.assert_array_equal(got[kept], row[kept])


def test_what_a_mask_left_out_is_not_kept_by_a_large_top_k(rng):
    logits = np.full((1, V), -np.inf, np.float32)
    logits[0, [3, 8]] = 1, 2
    found = np.asarray(filtered(jnp.asarray(logits), make(1, top_k=[10], top_p=[0.999])))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [3, 8]


def test_penalties_biases_ends_and_masks(rng):
    logits = rng.standard_normal((2, V)).astype(np.float32)
    counts = np.zeros((2, V), int)
    # Row 0 reads slot 1: token 4 is in the prompt, 5 was said twice, 6 is both.
    counts[1, [4, 5, 6]] = PROMPT, 2, PROMPT + 1
    allowed = rng.random(V) < 0.7
    allowed[[4, 5, 6, 9, 20]] = True
    padded = np.zeros(-(-V // 32) * 32, bool)
    padded[:V] = allowed
    masks = np.zeros((2, padded.size // 32), np.uint32)
    masks[1] = np.packbits(padded, bitorder="little").view(np.uint32)
    s = make(
        2, special=[True, False], repetition=[1.3, 9.0], presence=[0.5, 9.0], frequency=[0.25, 9.0], counts=counts,
        bias_ids=[[0, 0, 0, 0], [9, 20, -1, -1]], bias=[[9.0] * 4, [1.5, -2.0, 7.0, 7.0]],
        stops=[[3, 20, -1], [3, -1, -1]], min_until=[6, 99], masked=[True, True], masks=masks,
    )  # fmt: skip
    expected = logits[0].astype(np.float64)
    for token in (4, 5, 6):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[5] -= 0.5 + 2 * 0.25
    expected[6] -= 0.5 + 0.25
    expected[[9, 20]] += 1.5, -2
    expected[[3, 20]] = -np.inf
    expected[~allowed] = -np.inf
    found = np.asarray(adjusted(jnp.asarray(logits), s))
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(found[1], logits[1])


def test_logprobs_are_of_the_model_itself(rng):
    logits = 3 * rng.standard_normal((3, V)).astype(np.float32)
    tokens = rng.integers(0, V, 3)
    found = score(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), 6)
    expected = special.log_softmax(logits.astype(np.float64), -1)
    np.testing.assert_allclose(found.logprob, expected[range(3), tokens], rtol=1e-5)
    np.testing.assert_array_equal(found.top, np.argsort(-logits, -1)[:, :6])
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-expected, -1)[:, :6], rtol=1e-5)
    ranks = [1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert found.rank.tolist() == ranks


def test_wanted_logprobs_come_with_any_row_that_wants_them(rng):
    logits = jnp.asarray(rng.standard_normal((2, V)), jnp.float32)
    found = jax.jit(sample, static_argnums=2)(logits, make(2, wanted=[False, True]), 3)
    assert found.top.shape == (2, 3)
    assert (found.logprob < 0).all()


def test_a_small_vocabulary_has_fewer_than_top(rng):
    found = score(jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32), 6)
    assert found.top[0].tolist() == [0, 1, 2, 3, -1, -1]

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.bert.model.bert import decoded
from fullstride.bert.model.layers import Dense, Dropout, Embedding, LayerNorm, gelu


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_dense_and_norm_are_equinoxs(seed):
    x = random(seed, 3, 4, 7)
    dense = eqx.tree_at(lambda d: d.bias, Dense(7, 5, std=0.5, key=jax.random.key(seed)), random(seed + 1, 5))
    linear = eqx.nn.Linear(7, 5, key=jax.random.key(0))
    linear = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (dense.weight, dense.bias))
    np.testing.assert_allclose(dense(x), jax.vmap(jax.vmap(linear))(x), atol=1e-5)
    norm, theirs = LayerNorm(7, eps=1e-3), eqx.nn.LayerNorm(7, eps=1e-3)
    weights = random(seed + 2, 7), random(seed + 3, 7)
    norm, theirs = (eqx.tree_at(lambda m: (m.weight, m.bias), m, weights) for m in (norm, theirs))
    np.testing.assert_allclose(norm(x), jax.vmap(jax.vmap(theirs))(x), atol=1e-5)


def test_a_norm_of_bf16_is_computed_in_fp32(seed):
    x = (random(seed, 5, 64) * 3 + 200).astype(jnp.bfloat16)
    norm = jax.tree.map(lambda p: p.astype(jnp.bfloat16), LayerNorm(64, eps=1e-12))
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), expected, rtol=2**-8, atol=1e-4)


def test_gelu_is_that_of_erf():
    x = np.linspace(-5, 5, 101, dtype="f")
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    np.testing.assert_allclose(gelu(jnp.asarray(x)), expected, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_the_share(rate):
    x = jnp.ones((400, 500))
    y = np.asarray(Dropout(rate)(x, jax.random.key(1)))
    kept = (y != 0).mean()
    assert kept == pytest.approx(1 - rate, abs=5 * math.sqrt(rate * (1 - rate) / x.size))
    assert len(np.unique(y)) == 2
    assert y.max() == pytest.approx(1 / (1 - rate), rel=1e-3)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_keeps_the_mean_of_bf16_and_of_its_gradients(rate, seed):
    # What is kept is 1 / (1 - rate) times as large but for rounding to nearest, which has no side.
    x = (random(seed, 1000, 500) / 4 + 3).astype(jnp.bfloat16)
    y, pull = jax.vjp(lambda x: Dropout(rate)(x, jax.random.key(seed)), x)
    (gradient,) = pull(x)
    for out in (y, gradient):
        assert out.dtype == jnp.bfloat16
        wide, kept = np.asarray(out, np.float64), np.asarray(out) != 0
        share = wide[kept].sum() / np.asarray(x, np.float64)[kept].sum() * (1 - rate)
        assert share == pytest.approx(1, abs=2e-4)


def test_a_share_next_to_all_drops_next_to_all():
    y = np.asarray(Dropout(1 - 1e-7)(jnp.ones((1000, 1000)), jax.random.key(0)))
    assert 0 < (y != 0).sum() < 60
    assert y.max() == 2**16


@pytest.mark.parametrize("rows", [5, 40])
def test_a_gradient_goes_to_the_row_that_was_read(rows):
    embedding, ids = Embedding(rows, 2, std=1.0, key=jax.random.key(0)), jnp.asarray([-1, 0, rows + 3])
    np.testing.assert_array_equal(embedding(ids), embedding.weight[jnp.asarray([0, 0, rows - 1])])
    gradient = np.asarray(jax.grad(lambda e: e(ids).sum())(embedding).weight[:, 0])
    assert (gradient[0], gradient[-1], gradient.sum()) == (2, 1, 3)


@pytest.mark.parametrize("rows", [5, 40])
def test_an_embedding_and_its_gradient_are_those_of_indexing(rows, seed):
    table, ids = random(seed, rows, 6), jnp.asarray(np.random.default_rng(seed).integers(0, rows, (4, 9)))
    weights = random(seed + 1, 4, 9, 6)
    embedding = eqx.tree_at(lambda e: e.weight, Embedding(rows, 6, std=1.0, key=jax.random.key(0)), table)
    np.testing.assert_allclose(embedding(ids), table[ids], atol=1e-6)
    ours = jax.grad(lambda e: jnp.sum(e(ids) * weights))(embedding).weight
    np.testing.assert_allclose(ours, jax.grad(lambda t: jnp.sum(t[ids] * weights))(table), atol=1e-5)


@pytest.mark.parametrize("rows", [5, 40])
def test_a_frequent_tokens_gradient_is_not_lost_in_bf16(rows):
    embedding = jax.tree.map(lambda p: p.astype(jnp.bfloat16), Embedding(rows, 2, std=1.0, key=jax.random.key(0)))
    gradient = jax.grad(lambda e: e(jnp.full((4096,), 3)).astype(jnp.float32).sum())(embedding).weight
    # Added up in bf16 it would stop at 256.
    np.testing.assert_array_equal(np.asarray(gradient[3], np.float32), 4096)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_decoders_gradients_are_a_products(dtype, seed):
    x, table, weights = random(seed, 3, 4, 8), random(seed + 1, 19, 8), random(seed + 2, 3, 4, 19)
    short = x.astype(dtype), table.astype(dtype)

    def total(f):
        return lambda x, table: jnp.sum(f(x, table) * weights)

    assert decoded(*short).dtype == jnp.float32
    ours = jax.grad(total(decoded), (0, 1))(*short)
    wide = [a.astype(jnp.float32) for a in short]
    expected = jax.grad(total(lambda x, table: jnp.einsum("abh,vh->abv", x, table)), (0, 1))(*wide)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == dtype
        scale = np.abs(b).max()
        np.testing.assert_allclose(np.asarray(a, "f") / scale, b / scale, atol=1e-6 if dtype == jnp.float32 else 2**-7)

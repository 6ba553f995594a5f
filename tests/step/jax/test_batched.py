import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.step.jax.batched import Batched, StackedLeaf


def _evaluated(function, stack):
    """A function of a list of leaves, evaluated on their stack; which outputs are lanes; how many equations ran."""
    leaves = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)] * len(stack)
    closed = jax.make_jaxpr(function)(leaves)
    batched = Batched()
    out = batched.run(closed.jaxpr, closed.consts, [StackedLeaf(stack, i) for i in range(len(stack))])
    return [np.asarray(batched.leaf(x)) for x in out], [isinstance(x, StackedLeaf) for x in out], len(batched._results)


def _elementwise(leaves):
    return [jnp.where(x > 0, jnp.sin(x) * 2, x) + 1 for x in leaves]


def _norms(leaves):
    return [x / jnp.sqrt(jnp.sum(x * x)) for x in leaves]


def _global_norm(leaves):
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))
    return [jnp.minimum(1 / norm, 1.0) * x for x in leaves]


def _products(leaves):
    return [x @ x.T for x in leaves]


def _neighbours(leaves):
    return [a + jnp.flip(b) for a, b in zip(leaves, leaves[1:] + leaves[:1], strict=True)]


def _by_place(leaves):
    return [x * i for i, x in enumerate(leaves)]


def _reversed(leaves):
    return leaves[::-1]


@pytest.mark.parametrize(
    ("function", "lanes"),
    [
        (_elementwise, 5),
        (_norms, 5),
        (_global_norm, 5),
        (_products, 5),
        (_neighbours, 0),
        (_by_place, 5),
        (_reversed, 5),
    ],
)
def test_any_function_of_leaves_gives_what_it_gives_on_leaves(seed, function, lanes):
    stack = jnp.asarray(np.random.default_rng(seed).normal(size=(5, 3, 3)), jnp.float32)
    found, kinds, _ = _evaluated(function, stack)
    for out, expected in zip(found, function(list(stack)), strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert sum(kinds) == lanes


@pytest.mark.parametrize("function", [_elementwise, _norms, _products])
def test_equal_work_is_done_once(function):
    counts = [_evaluated(function, jnp.ones((n, 2, 2)))[2] for n in (2, 6)]
    assert counts[0] == counts[1]


def test_effects_happen_for_every_leaf():
    seen = []

    def told(leaves):
        for x in leaves:
            jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return leaves

    _evaluated(told, jnp.arange(3.0)[:, None])
    jax.effects_barrier()
    assert sorted(seen) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("simplified", [False, True])
def test_constants_that_print_alike_are_not_one(simplified):
    # To the eight places that NumPy prints, and to the few elements.
    close, masks = [0.00012345, 0.000123451, 0.0001234512], [np.ones(2000, "f") for _ in range(3)]
    masks[1][1000], masks[2][1001] = 0, 0

    def function(leaves):
        return [x * jnp.float32(c) * m for x, m, c in zip(leaves, masks, close, strict=True)]

    option = "jax_use_simplified_jaxpr_constants"
    if option not in jax.config.values:
        pytest.skip("this JAX has no choice of how it keeps constants")
    before = jax.config.values[option]
    jax.config.update(option, simplified)
    try:
        found, _, _ = _evaluated(function, jnp.ones((3, 2000)))
    finally:
        jax.config.update(option, before)
    np.testing.assert_array_equal(found, [m * np.float32(c) for m, c in zip(masks, close, strict=True)])

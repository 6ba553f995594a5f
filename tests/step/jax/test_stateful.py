"""Layers with a state of their own, such as BatchNorm, in the styles that take one and in the one that does not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import Optimizer, RetraceWarning, TrainStep, cached_filter_jit, make_train_step
from tests.step.jax.nets import assert_trees, batch_of


class Normed(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(x), state


def _loss(model, given, key):
    state, batch = given
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
    return jnp.mean((out - batch["y"]) ** 2), state


@pytest.fixture(autouse=True)
def _promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _new():
    return eqx.nn.make_with_state(Normed)(jax.random.key(0))


def _own_loop(wrap):
    """A plain loop whose step is wrapped."""
    (model, state), tx = _new(), optax.adam(1e-2)

    @wrap
    def step(model, state, opt_state, batch):
        (_, state), grads = eqx.filter_value_and_grad(_loss, has_aux=True)(model, (state, batch), None)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for i in range(3):
        model, state, opt_state = step(model, state, opt_state, batch_of(i))
    return model, state


def _call_style(**settings):
    (model, state), step = _new(), make_train_step(_loss, **settings)
    optimizer = Optimizer.create(optax.adam(1e-2), model)
    for i in range(3):
        model, optimizer, state = step(model, optimizer, (state, batch_of(i)))
    return model, state


def test_the_styles_that_take_a_state_train_as_the_plain_loop():
    expected = _own_loop(eqx.filter_jit)
    for found in (_call_style(), _own_loop(cached_filter_jit), _own_loop(cached_filter_jit(donate="all"))):
        assert_trees(found[0], expected[0])
        for a, b in zip(*(jax.tree.leaves(x[1]) for x in (found, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_state_beside_the_batch_is_treated_as_one():
    with pytest.warns(RetraceWarning, match="bfloat16"):
        _, state = _call_style(precision="bf16")
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"bool", "bfloat16"}
    with pytest.raises(ConfigError, match=r"is bool\[\]; accumulate=2 needs a first axis that it divides"):
        _call_style(accumulate=2)


def test_a_train_step_refuses_a_state_which_it_would_not_carry():
    def loss_fn(both, batch, key):
        return _loss(both[0], (both[1], batch), key)[0]

    with pytest.raises(ConfigError, match=r"wrt takes an equinox\.nn\.State.*with the batch of a make_train_step"):
        TrainStep(loss_fn, optax.adam(1e-2), _new())
    model, state = _new()
    step = TrainStep(loss_fn, optax.adam(1e-2), (model, state), wrt=(eqx.is_inexact_array, False))
    trained, _ = step(step.init(), batch_of(0))
    step.finish()
    assert_trees(trained.model[1], state)  # frozen
    assert not np.array_equal(trained.model[0].last.weight, model.last.weight)

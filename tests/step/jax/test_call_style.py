import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import (
    LossScale,
    Optimizer,
    Precision,
    RetraceWarning,
    make_train_step,
    make_train_step_with_partition,
)
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, squared


def test_the_call_style_agrees_with_the_plain_loop(seed):
    batches, keys = [batch_of(seed + i) for i in range(4)], list(jax.random.split(jax.random.key(seed), 4))
    trained, opt_state, losses = plain_loop(Net(seed), adam(), batches, keys)
    model, train_step = Net(seed), make_train_step(squared, on_retrace="raise")
    optimizer, mine = Optimizer.create(adam(), model), []
    for batch, key in zip(batches, keys, strict=True):
        model, optimizer, loss = train_step(model, optimizer, batch, key)
        mine.append(float(loss))
    assert_trees(model, trained)
    assert_trees(optimizer.opt_state, opt_state)
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    assert train_step.traces == 1
    train_step.finish()


def test_the_explicit_form_agrees_with_the_plain_loop(seed):
    batches = [batch_of(seed + i) for i in range(3)]
    trained, expected, losses = plain_loop(Net(seed), adam(), batches)
    step, mine = make_train_step_with_partition(squared, adam(), Net(seed)), []
    params, opt_state = step.params, step.opt_state
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        mine.append(float(loss))
    assert_trees(step.combine(params), trained)
    assert_trees(step.combine_state(opt_state), expected)
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    assert all(isinstance(x, jax.Array) for x in (*params, *opt_state))


def test_modules_are_used_again_and_held_ones_are_not():
    model, train_step = Net(0), make_train_step(squared)
    optimizer = Optimizer.create(adam(), model)
    model, optimizer, _ = train_step(model, optimizer, batch_of(0))
    known = id(model), id(optimizer), id(optimizer.opt_state[1][0].mu)
    model, optimizer, _ = train_step(model, optimizer, batch_of(1))
    assert (id(model), id(optimizer), id(optimizer.opt_state[1][0].mu)) == known
    held = model, optimizer.opt_state
    model, optimizer, _ = train_step(model, optimizer, batch=batch_of(2))
    assert model is not held[0]
    assert held[0].last.bias.is_deleted()
    assert held[1][1][0].mu.last.bias.is_deleted()
    assert not optimizer.opt_state[1][0].mu.last.bias.is_deleted()


class Odd(eqx.Module):
    """One array at two places, a weak type, a key."""

    a: jax.Array
    b: jax.Array
    scale: jax.Array
    key: jax.Array

    def __init__(self):
        self.a = self.b = jnp.arange(3.0) + 1
        self.scale, self.key = jnp.asarray(2.0), jax.random.key(5)


def _odd_loss(model, batch, key):
    return jnp.sum((model.a * model.b * model.scale - jax.random.normal(model.key, (3,)) - batch) ** 2)


@pytest.mark.parametrize("optimizer", [optax.adam, optax.contrib.cocob], ids=["adam", "cocob"])
def test_arrays_at_two_places_weak_types_and_keys(optimizer):
    # COCOB's state starts with the parameters themselves.
    tx, batches = optimizer(0.1), [np.ones(3, "f")] * 3
    trained, _, losses = plain_loop(Odd(), tx, batches, loss_fn=_odd_loss)
    train_step, model, mine = make_train_step(_odd_loss, on_retrace="raise"), Odd(), []
    optimizer = Optimizer.create(tx, model)
    for batch in batches:
        model, optimizer, loss = train_step(model, optimizer, batch)
        mine.append(float(loss))
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    np.testing.assert_allclose(model.a, trained.a, rtol=1e-5)
    assert model.key == jax.random.key(5)
    step = make_train_step_with_partition(_odd_loss, tx, Odd())
    params, opt_state = step.params, step.opt_state
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, batch)
    np.testing.assert_allclose(step.combine(params).b, trained.b, rtol=1e-5)
    assert step.jitted._cache_size() == 1


def test_what_was_donated_is_named():
    train_step, model = make_train_step(squared), Net(0)
    optimizer = Optimizer.create(adam(), model)
    train_step(model, optimizer, batch_of(0))
    with pytest.raises(ConfigError, match="model or optimizer: its arrays were donated to an earlier call"):
        train_step(model, optimizer, batch_of(0))


def test_a_tuple_that_is_held_keeps_its_modules():
    model, train_step = Net(0), make_train_step(squared)
    model, optimizer, _ = train_step(model, Optimizer.create(adam(), model), batch_of(0))
    # Adam's state within the chain's.
    held = optimizer.opt_state[1][0]
    for i in range(3):
        model, optimizer, _ = train_step(model, optimizer, batch_of(i))
    assert held.mu.last.bias.is_deleted()
    assert not optimizer.opt_state[1][0].mu.last.bias.is_deleted()


def test_aux_is_what_the_loss_returned_beside_it():
    train_step = make_train_step(lambda m, b, k: (squared(m, b, k), {"rows": len(b["x"]), "tag": "x"}))
    model = Net(0)
    model, _, aux = train_step(model, Optimizer.create(adam(), model), batch_of(0))
    assert (int(aux["rows"]), aux["tag"]) == (6, "x")


def test_an_optimizer_works_in_a_loop_of_ones_own(seed):
    @eqx.filter_jit
    def step(model, optimizer, batch):
        grads = eqx.filter_grad(squared)(model, batch, None)
        return optimizer(grads, model)

    model, optimizer = Net(seed), Optimizer.create(adam(), Net(seed))
    for i in range(2):
        model, optimizer = step(model, optimizer, batch_of(i))
    assert_trees(model, plain_loop(Net(seed), adam(), [batch_of(0), batch_of(1)])[0])
    assert len(jax.tree.leaves(optimizer)) == len(jax.tree.leaves(optimizer.opt_state))


def test_only_wrt_is_trained():
    model = Net(0)
    spec = eqx.tree_at(lambda m: m.last, jax.tree.map(lambda _: False, model), replace=True)
    start = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, model)
    new, _, _ = make_train_step(squared)(model, Optimizer.create(optax.sgd(0.1), model, spec), batch_of(0))
    np.testing.assert_array_equal(new.first.weight, start.first.weight)
    assert not np.allclose(new.last.weight, start.last.weight)


def test_errors_are_polled_and_a_retrace_is_named():
    train_step = make_train_step(lambda m, b, k: eqx.error_if(squared(m, b, k), b["bad"], "a bad batch"))
    model = Net(0)
    optimizer = Optimizer.create(adam(), model)
    model, optimizer, _ = train_step(model, optimizer, batch_of(0) | {"bad": np.asarray(False)})
    with pytest.warns(RetraceWarning, match=r"batch\['x'\] was float32\[6,3\], now float32\[5,3\]"):
        model, optimizer, _ = train_step(model, optimizer, batch_of(0, 5) | {"bad": np.asarray(False)})
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"a bad batch \(step 3\)"):
        _two(train_step, model, optimizer, batch_of(0) | {"bad": np.asarray(True)})


def _two(train_step, model, optimizer, batch):
    model, optimizer, _ = train_step(model, optimizer, batch)
    train_step(model, optimizer, batch)
    train_step.finish()


def test_a_loss_that_is_not_finite_is_raised():
    train_step, model = make_train_step(squared), Net(0)
    train_step(model, Optimizer.create(adam(), model), batch_of(0) | {"y": np.full((6, 2), np.nan, "f")})
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        train_step.finish()
    assert train_step.report().steps == 0


def test_precision_and_accumulation_go_through():
    model, batch = Net(0), batch_of(0)
    plain = make_train_step_with_partition(squared, optax.sgd(0.1), model)
    parts = make_train_step_with_partition(squared, optax.sgd(0.1), model, accumulate=3)
    low = make_train_step_with_partition(squared, optax.sgd(0.1), model, precision="bf16")
    results = [step.combine(step(step.params, step.opt_state, batch)[0]) for step in (plain, parts, low)]
    assert_trees(results[1], results[0], 1e-4, 1e-6)
    assert not np.array_equal(results[2].first.weight, results[0].first.weight)
    assert_trees(results[2], results[0], 2e-2, 1e-2)


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="dynamic loss scaling needs a TrainStep"):
        make_train_step(squared, precision=Precision(loss_scale=LossScale()))
    with pytest.raises(ConfigError, match="dynamic loss scaling needs a TrainStep"):
        make_train_step_with_partition(squared, adam(), Net(0), precision="fp16")
    with pytest.raises(ConfigError, match="accumulate=0"):
        make_train_step(squared, accumulate=0)
    with pytest.raises(ConfigError, match="optimizer is a tuple; expected Optimizer.create"):
        make_train_step(squared)(Net(0), (), batch_of(0))
    with pytest.raises(ConfigError, match="no leaf of this dict is trained"):
        Optimizer.create(adam(), {"a": jnp.arange(2)})
    with pytest.raises(TypeError, match="'batch'"):
        make_train_step(squared)(Net(0), Optimizer.create(adam(), Net(0)))

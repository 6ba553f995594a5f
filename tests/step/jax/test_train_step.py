from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep, make_train_step_with_partition
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, run, squared


def test_agrees_with_the_plain_loop(seed):
    model, batches = Net(seed), [batch_of(10 * seed + i) for i in range(4)]
    keys = list(jax.random.split(jax.random.key(seed), 4))
    trained, opt_state, losses = plain_loop(model, adam(), batches, keys)
    step = TrainStep(squared, adam(), model)
    state, mine = run(step, batches, keys)
    assert_trees(state.model, trained)
    assert_trees(state.opt_state, opt_state)
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    assert state.step == 4
    assert step.traces == 1


def test_metrics_come_one_step_late():
    step = TrainStep(lambda m, b, k: (squared(m, b, k), {"count": jnp.asarray(3)}), adam(), Net(0), grad_norm=True)
    state, none = step(step.init(), batch_of(0))
    assert not none
    assert none.step == 0
    state, first = step(state, batch_of(1))
    assert first.step == 1
    assert set(first) == {"loss", "count", "grad_norm"}
    assert first["count"] == 3
    last = step.finish()
    assert (last.step, state.step) == (2, 2)
    assert last["loss"] != first["loss"]


def test_another_runs_metrics_are_not_those_of_the_step_before():
    step = TrainStep(squared, adam(), Net(0))
    run(step, [batch_of(i) for i in range(3)])
    state, none = step(step.init(), batch_of(5))
    assert not none
    assert none.step == 0
    _, first = step(state, batch_of(6))
    assert first.step == 1


def test_runs_that_take_turns_get_their_own_metrics():
    alone = {seed: run(TrainStep(squared, adam(), Net(0)), [batch_of(seed)] * 3)[1] for seed in (1, 2)}
    step = TrainStep(squared, adam(), Net(0), on_retrace="raise")
    states, got = {seed: step.init() for seed in alone}, {seed: [] for seed in alone}
    for _ in range(3):
        for seed in alone:
            states[seed], late = step(states[seed], batch_of(seed))
            got[seed] += [late["loss"]] if late else []
    assert got == {seed: losses[:-1] for seed, losses in alone.items()}
    assert step.finish()["loss"] == alone[2][-1]
    # The metrics are no leaves: a copy of a state is of the same structure, and has none.
    copy = jax.tree.map(jnp.copy, states[1])
    assert jax.tree.structure(copy) == jax.tree.structure(step.init())
    assert not step(copy, batch_of(1))[1]
    assert step.traces == 1


def test_gradient_norm_and_loss_are_those_of_the_model(seed):
    model, batch = Net(seed), batch_of(seed)
    step = TrainStep(squared, adam(), model, grad_norm=True)
    step(step.init(), batch)
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(squared))(model, batch, None)
    flat = np.concatenate([np.ravel(g).astype("d") for g in jax.tree.leaves(grads)])
    metrics = step.finish()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(flat), rtol=1e-5)


def test_buffers_are_donated_and_the_model_is_not():
    model = Net(0)
    step = TrainStep(squared, adam(), model)
    state = step.init()
    old = state.buffers
    new, _ = step(state, batch_of(0))
    step.finish()
    assert all(x.is_deleted() for x in old)
    assert not any(x.is_deleted() for x in (*jax.tree.leaves(eqx.filter(model, eqx.is_array)), *new.fixed))
    with pytest.raises(ConfigError, match="state: that of step 0 was donated to an earlier call.*donate=False"):
        step(state, batch_of(0))
    with pytest.raises(ConfigError, match="state: that of step 0 was donated to an earlier call"):
        _ = state.model
    again, _ = step(new, batch_of(1))
    assert again.step == 2


def test_without_donation_a_state_can_be_used_again(seed):
    step = TrainStep(squared, adam(), Net(seed), donate=False)
    state = step.init()
    first, second = (step(state, batch_of(seed))[0] for _ in range(2))
    assert_trees(first.model, second.model, 0, 0)
    assert not any(x.is_deleted() for x in state.buffers)


def test_fixed_leaves_stay_the_users_own_and_only_wrt_is_trained():
    model = Net(0)
    spec = eqx.tree_at(lambda m: m.last.weight, jax.tree.map(lambda _: False, model), replace=True)
    step = TrainStep(squared, optax.sgd(0.1), model, wrt=spec)
    state, _ = run(step, [batch_of(0)])
    assert len(state.buffers) == 2
    assert state.model.ids is model.ids
    assert state.model.first.weight is model.first.weight
    gradient = eqx.filter_jit(eqx.filter_grad(squared))(model, batch_of(0), None).last.weight
    np.testing.assert_allclose(state.model.last.weight, model.last.weight - 0.1 * gradient, rtol=1e-5)


def test_trees_are_built_when_looked_at_and_once():
    step = TrainStep(squared, adam(), Net(0))
    state = step.init()
    assert state.model is state.model
    assert state.opt_state is state.opt_state
    assert state.ema_model is None
    assert jax.tree.leaves(state)[: len(state.buffers)] == list(state.buffers)
    assert jax.tree.map(lambda x: x, state).step == 0
    assert "buffers" in repr(state)


@pytest.mark.parametrize("count", [2, 3])
def test_accumulation_is_the_mean_of_interleaved_micro_batches(count):
    model, batch, key = Net(1), batch_of(1), jax.random.key(5)

    def counted(model, batch, key):
        return squared(model, batch, key), {"rows": jnp.asarray(len(batch["x"])), "half": jnp.asarray(0.5)}

    step = TrainStep(counted, optax.sgd(1.0), model, accumulate=count)
    state, (loss,) = run(step, [batch], [key])
    value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(squared))
    parts = [
        value_and_grad(model, jax.tree.map(lambda x, i=i: x[i::count], batch), k)
        for i, k in enumerate(jax.random.split(key, count))
    ]
    np.testing.assert_allclose(loss, np.mean([p[0] for p in parts]), rtol=1e-5)
    grads = jax.tree.map(lambda *g: sum(g) / count, *[p[1] for p in parts])
    assert_trees(state.model, eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)))
    assert step.finish()["rows"] == 6
    assert step.finish()["half"] == 0.5


def test_accumulation_without_dropout_is_the_whole_batch(seed):
    batches = [batch_of(seed)]
    whole, _ = run(TrainStep(squared, adam(), Net(seed)), batches)
    parts, _ = run(TrainStep(squared, adam(), Net(seed), accumulate=6), batches)
    assert_trees(parts.model, whole.model, 1e-4, 1e-5)


def _warm_up(n: Any) -> Any:
    return jnp.minimum(jnp.float32(0.75), (1 + n).astype("float32") / (10 + n).astype("float32"))


@pytest.mark.parametrize(("ema", "decays"), [(0.75, [0.75] * 3), (_warm_up, [1 / 10, 2 / 11, 3 / 12])])
def test_the_average_follows_the_parameters(ema, decays):
    model = Net(2)
    step = TrainStep(squared, optax.sgd(0.1), model, ema=ema)
    state, expected = step.init(), model.last.weight
    for i, d in enumerate(decays):
        state, _ = step(state, batch_of(i))
        expected = d * expected + (1 - d) * np.asarray(state.model.last.weight)
    np.testing.assert_allclose(state.ema_model.last.weight, expected, rtol=1e-5)
    assert not np.allclose(state.ema_model.last.weight, state.model.last.weight)
    assert state.ema_model.name == "net"


def test_the_average_of_short_parameters_is_kept_in_fp32():
    def short(tree):
        return jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_inexact_array(x) else x, tree)

    batch = short(jax.tree.map(jnp.asarray, batch_of(0)))
    step = TrainStep(squared, optax.sgd(0.5), short(Net(0)), ema=0.999)
    state, expected = step.init(), np.asarray(Net(0).last.weight.astype("bfloat16"), "d")
    for _ in range(20):
        state, _ = step(state, batch)
        expected += 0.001 * (np.asarray(state.model.last.weight, "d") - expected)
    np.testing.assert_allclose(state.carry.ema.last.weight, expected, rtol=1e-4)
    assert state.ema_model.last.weight.dtype == "bfloat16"
    assert step.traces == 1


def test_optax_gets_the_loss_and_the_learning_rate_is_reported():
    with jax.numpy_dtype_promotion("standard"):
        rate = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.4, 0.0, 4))
        chain = optax.chain(rate, optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
        step = TrainStep(squared, chain, Net(0))
        state, _ = run(step, [batch_of(0)] * 3)
    assert step.finish()["learning_rate"] == pytest.approx(0.2)
    assert float(state.opt_state[1].best_value) < np.inf
    assert step.traces == 1


def test_weak_types_do_not_have_the_step_traced_again():
    class Scalar(eqx.Module):
        a: jax.Array = eqx.field(default_factory=lambda: jnp.asarray(1.0))

    assert Scalar().a.weak_type
    step = TrainStep(lambda m, b, k: (m.a - b) ** 2, optax.adam(0.1), Scalar(), on_retrace="raise")
    state, losses = run(step, [np.float32(3.0)] * 4)
    assert step.traces == 1
    assert losses == sorted(losses, reverse=True)
    assert not any(x.weak_type for x in state.buffers)


@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_arrays_of_numpy_are_taken_as_jax_takes_them(layout, seed):
    def numpy(dtype: str) -> Any:
        return jax.tree.map(lambda x: np.asarray(x, dtype) if eqx.is_inexact_array(x) else x, Net(seed))

    # Positions as NumPy counts them, in 64 bits.
    given = eqx.tree_at(lambda m: m.ids, numpy("float64"), np.arange(5))
    step = TrainStep(squared, adam(), given, layout=layout, ema=0.5)
    state, losses = run(step, [batch_of(0)] * 2)
    trained, _, expected = plain_loop(numpy("float32"), adam(), [batch_of(0)] * 2)
    assert_trees(state.model, trained)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    explicit = make_train_step_with_partition(squared, adam(), given)
    params, _, _ = explicit(explicit.params, explicit.opt_state, batch_of(0))
    assert_trees(explicit.combine(params), run(step, [batch_of(0)])[0].model)


def test_init_starts_from_another_model_of_the_same_kind(seed):
    step = TrainStep(squared, adam(), eqx.filter_eval_shape(Net, 0))
    state, _ = run(step, [batch_of(0)], state=step.init(Net(seed)))
    trained, _, _ = plain_loop(Net(seed), adam(), [batch_of(0)])
    assert_trees(state.model, trained)


def test_states_fit_a_step_of_the_same_model_and_no_other():
    first, second = (TrainStep(loss, adam(), Net(0)) for loss in (squared, lambda m, b, k: 2 * squared(m, b, k)))
    state, _ = first(first.init(), batch_of(0))
    state, _ = second(state, batch_of(1))
    assert state.step == 2
    third = TrainStep(squared, adam(), Net(0, width=4))
    with pytest.raises(ConfigError, match="state: it belongs to a step of another model"):
        third(TrainStep(squared, optax.sgd(0.1), Net(0)).init(), batch_of(0))
    with pytest.raises(ConfigError, match="state is a tuple; expected a State"):
        third((1, 2), batch_of(0))

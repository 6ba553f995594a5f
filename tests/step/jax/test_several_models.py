"""Several models with an optimizer each, beside the loops that a user writes by hand."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from fullstride.step.jax.checkpoint import Checkpoints
from tests.step.jax.nets import Net, assert_trees, batch_of, run


@pytest.fixture(autouse=True)
def _promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Judge(eqx.Module):
    first: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.SpectralNorm(eqx.nn.Linear(2, 4, key=keys[0]), "weight", key=keys[1])
        self.last = eqx.nn.Linear(4, 1, key=keys[2])

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.last(jax.nn.relu(x))[0], state


def _gan():
    judge, state = eqx.nn.make_with_state(Judge)(jax.random.key(1))
    return {"judge": judge, "maker": Net(0)}, state


def _judged(models, state, x):
    return jax.vmap(models["judge"], in_axes=(0, None), out_axes=(0, None))(x, state)


def judge_loss(models, state, batch, key):
    fake = jax.vmap(models["maker"])(jax.random.normal(key, batch["x"].shape))
    real, state = _judged(models, state, batch["y"])
    made, state = _judged(models, state, fake)
    return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(made)), state


def maker_loss(models, state, batch, key):
    fake = jax.vmap(models["maker"])(jax.random.normal(key, batch["x"].shape))
    made, state = _judged(models, state, fake)
    return jnp.mean(jax.nn.softplus(-made)), state, {"made": made.mean()}


GAN = {"judge": judge_loss, "maker": maker_loss}
TX = {"judge": optax.adam(1e-2), "maker": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(3e-3))}
BATCHES = [batch_of(i) for i in range(3)]
KEYS = list(jax.random.split(jax.random.key(7), 3))


def _by_hand():
    """The usual loop: the judge's step, then the maker's, against the judge as it is by then."""

    def first(judge, maker, state, batch, key):
        return judge_loss({"judge": judge, "maker": maker}, state, batch, key)

    def second(maker, judge, state, batch, key):
        loss, state, _ = maker_loss({"judge": judge, "maker": maker}, state, batch, key)
        return loss, state

    @eqx.filter_jit
    def step(judge, maker, state, judge_opt, maker_opt, batch, key):
        (one, state), grads = eqx.filter_value_and_grad(first, has_aux=True)(judge, maker, state, batch, key)
        updates, judge_opt = TX["judge"].update(grads, judge_opt)
        judge = eqx.apply_updates(judge, updates)
        (two, state), grads = eqx.filter_value_and_grad(second, has_aux=True)(maker, judge, state, batch, key)
        updates, maker_opt = TX["maker"].update(grads, maker_opt)
        return judge, eqx.apply_updates(maker, updates), state, judge_opt, maker_opt, (one, two)

    models, state = _gan()
    judge, maker = models["judge"], models["maker"]
    states = [TX[name].init(eqx.filter(models[name], eqx.is_inexact_array)) for name in ("judge", "maker")]
    losses = []
    for batch, key in zip(BATCHES, KEYS, strict=True):
        judge, maker, state, one, two, both = step(judge, maker, state, states[0], states[1], batch, key)
        states = [one, two]
        losses.append(tuple(map(float, both)))
    return {"judge": judge, "maker": maker}, state, dict(zip(("judge", "maker"), states, strict=True)), losses


def _gan_step(**settings):
    models, state = _gan()
    return TrainStep(GAN, TX, models, nn_state=state, **settings)


def _trained(step, state: Any = None, start: int = 0):
    metrics: Any = {}
    state, losses = step.init() if state is None else state, []
    for batch, key in zip(BATCHES[start:], KEYS[start:], strict=True):
        state, _ = step(state, batch, key)
        metrics = step.finish()
        losses.append((float(metrics["judge/loss"]), float(metrics["maker/loss"])))
        assert metrics["loss"] == metrics["judge/loss"] + metrics["maker/loss"]
    assert set(metrics) == {"loss", "judge/loss", "maker/loss", "maker/made"}
    return state, losses


def test_a_gan_with_two_optimizers_is_the_loop_by_hand(tmp_path):
    models, nn_state, opt_state, expected = _by_hand()
    step = _gan_step(layout="grouped")
    state, losses = _trained(step)
    assert losses == expected
    assert_trees((state.model, state.nn_state, state.opt_state), (models, nn_state, opt_state), 0, 0)
    assert step.traces == 1
    first, _ = step(step.init(), BATCHES[0], KEYS[0])
    flat = _gan_step()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first)
        resumed, _ = checkpoints.restore(flat)
    assert (resumed.step, len(resumed.buffers) > len(first.buffers)) == (1, True)
    assert _trained(flat, resumed, 1)[1] == expected[1:]


def critic_loss(models, target, batch, key):
    values = jax.vmap(models["critic"])(batch["x"])[:, 0]
    goal = batch["y"][:, 0] + 0.9 * jax.vmap(target)(batch["x"] + 1)[:, 0]
    slow = jax.tree.map(lambda a, b: 0.95 * a + 0.05 * b if eqx.is_inexact_array(a) else a, target, models["critic"])
    return jnp.mean((values - jax.lax.stop_gradient(goal)) ** 2), slow


def actor_loss(models, target, batch, key):
    moves = jax.vmap(models["actor"])(batch["x"])
    return -jnp.mean(jax.vmap(models["critic"])(jnp.pad(moves, ((0, 0), (0, 1))))), target


def test_an_actor_and_a_critic_with_a_target_network_and_a_frozen_model():
    models = {"actor": Net(1), "critic": Net(2), "teacher": Net(3)}
    txs = {"critic": optax.adam(1e-2), "actor": optax.sgd(0.1)}

    @eqx.filter_jit
    def by_hand(actor, critic, target, states, batch):
        one = lambda critic: critic_loss({"critic": critic, "actor": actor}, target, batch, None)  # noqa: E731
        (first, slow), grads = eqx.filter_value_and_grad(one, has_aux=True)(critic)
        updates, critic_state = txs["critic"].update(grads, states[0])
        critic = eqx.apply_updates(critic, updates)
        two = lambda actor: actor_loss({"critic": critic, "actor": actor}, slow, batch, None)[0]  # noqa: E731
        second, grads = eqx.filter_value_and_grad(two)(actor)
        updates, actor_state = txs["actor"].update(grads, states[1])
        return eqx.apply_updates(actor, updates), critic, slow, (critic_state, actor_state), first + second

    actor, critic, target = models["actor"], models["critic"], models["critic"]
    states: Any = tuple(txs[n].init(eqx.filter(models[n], eqx.is_inexact_array)) for n in ("critic", "actor"))
    expected = []
    for batch in BATCHES:
        actor, critic, target, states, loss = by_hand(actor, critic, target, states, batch)
        expected.append(float(loss))
    losses_of = {"critic": critic_loss, "actor": actor_loss}
    step = TrainStep(losses_of, txs, models, nn_state=models["critic"], ema=0.5, skip_nonfinite=True)
    state, losses = run(step, BATCHES)
    assert losses == expected
    assert_trees((state.model["actor"], state.model["critic"], state.nn_state), (actor, critic, target), 0, 0)
    assert_trees(state.model["teacher"], models["teacher"], 0, 0)
    assert set(state.ema_model) == {"actor", "critic", "teacher"}
    assert not np.array_equal(state.ema_model["actor"].last.weight, actor.last.weight)


def test_a_part_of_each_model_is_trained_and_both_see_several_steps_of_a_call():
    def loss(name):
        return lambda models, batch, key: jnp.mean(jax.vmap(models[name])(batch["x"]) ** 2)

    models, txs = {"a": Net(0), "b": Net(1)}, {"b": optax.sgd(0.1), "a": optax.adam(0.1)}
    last = eqx.tree_at(lambda m: m.last.weight, jax.tree.map(lambda _: False, Net(1)), replace=True)
    both = {"wrt": {"a": eqx.is_inexact_array, "b": last}, "precision": "fp16", "accumulate": 2}
    step = TrainStep({n: loss(n) for n in txs}, txs, models, steps_per_call=2, **both)
    state, _ = step(step.init(), jax.tree.map(lambda x: np.stack([x, x]), batch_of(0)))
    metrics = step.finish()
    assert {"a/loss_scale", "b/skipped"} <= set(metrics)
    # A lone model of the same settings goes the same way.
    for name, spec in both.pop("wrt").items():
        alone = TrainStep(lambda m, b, k, n=name: loss(n)({n: m}, b, k), txs[name], models[name], wrt=spec, **both)
        other, losses = run(alone, [batch_of(0)] * 2)
        assert list(metrics[f"{name}/loss"]) == losses
        assert_trees(state.model[name], other.model, 0, 0)
    assert state.step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Net(0)}, "model is a Net; expected a dict with critic, actor, as loss_fn has it"),
        ({"model": {"critic": Net(0)}}, "model has critic; expected a dict with critic, actor"),
        ({"optimizer": optax.sgd(0.1)}, "optimizer is a GradientTransformationExtraArgs; expected a dict with"),
        ({"optimizer": dict.fromkeys(("critic", "actor", "x"), optax.sgd(1.0))}, "one for each loss of loss_fn"),
        ({"wrt": {"critic": eqx.is_inexact_array, "actor": False}}, "not so of actor"),
    ],
)
def test_losses_optimizers_and_models_that_do_not_go_together(change, message):
    models, txs = ({n: f() for n in ("critic", "actor")} for f in (lambda: Net(0), lambda: optax.sgd(0.1)))
    given = {"loss_fn": {"critic": critic_loss, "actor": actor_loss}, "optimizer": txs, "model": models} | change
    with pytest.raises(ConfigError, match=message):
        TrainStep(**given)

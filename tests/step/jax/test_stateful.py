"""Layers with a state of their own, such as BatchNorm, beside the loops that a user writes by hand."""

from typing import Any

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
    TrainStep,
    cached_filter_jit,
    make_train_step,
)
from fullstride.step.jax.checkpoint import Checkpoints
from tests.step.jax.nets import assert_trees, batch_of, run


class Normed(eqx.Module):
    first: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 4, key=keys[0]), "weight", key=keys[2])
        self.last = eqx.nn.Linear(4, 2, key=keys[1])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.first(x, state)
        x, state = self.norm(x, state)
        return self.last(x), state


def _stateful(model, state, batch, key):
    run_all = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = run_all(batch["x"], state)
    return jnp.mean((out - batch["y"]).astype("float32") ** 2), state


def _beside(model, given, key):
    return _stateful(model, given[0], given[1], key)


@pytest.fixture(autouse=True)
def _promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _new() -> Any:
    make: Any = eqx.nn.make_with_state(Normed)
    return make(jax.random.key(0))


BATCHES = [batch_of(i) for i in range(4)]
TX = optax.adam(1e-2)


def _body(model, state, opt_state, batch):
    (loss, state), grads = eqx.filter_value_and_grad(_stateful, has_aux=True)(model, state, batch, None)
    updates, opt_state = TX.update(grads, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, loss


def _own_loop(step, batches: Any = BATCHES):
    """A loop of a step as `_body`; model, state and every loss."""
    model, state = _new()
    opt_state, losses = TX.init(eqx.filter(model, eqx.is_inexact_array)), []
    for batch in batches:
        model, state, opt_state, loss = step(model, state, opt_state, batch)
        losses.append(float(loss))
    return model, state, losses


@pytest.fixture(scope="module")
def expected():
    with jax.numpy_dtype_promotion("standard"):
        return _own_loop(eqx.filter_jit(_body))


def _step(**settings):
    model, state = _new()
    return TrainStep(_stateful, TX, model, nn_state=state, **settings)


def _call_style(**settings):
    (model, state), step = _new(), make_train_step(_beside, **settings)
    optimizer, losses = Optimizer.create(TX, model), []
    for batch in BATCHES:
        model, optimizer, state = step(model, optimizer, (state, batch))
        losses.append(float(step.loss))
    return model, state, losses


@pytest.mark.parametrize("layout", [pytest.param("flat", marks=pytest.mark.thorough), "grouped"])
def test_a_train_step_carries_the_state_as_the_loop_by_hand(layout, expected):
    step = _step(layout=layout)
    state, losses = run(step, BATCHES)
    assert losses == expected[2]
    assert_trees((state.model, state.nn_state), expected[:2], 0, 0)
    assert step.traces == 1
    # What the user gave is still theirs.
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(eqx.filter(step._nn_state, eqx.is_inexact_array)))


def test_the_other_styles_train_as_the_loop_by_hand(expected):
    for found in (_call_style(), _own_loop(cached_filter_jit(_body, donate="all"))):
        assert found[2] == expected[2]
        assert_trees(found[:2], expected[:2], 0, 0)


def test_several_steps_of_a_call_pass_the_state_on(expected):
    stacked = [jax.tree.map(lambda *x: np.stack(x), *BATCHES[i : i + 2]) for i in (0, 2)]
    step = _step(steps_per_call=2)
    state, late = step(step.init(), stacked[0])
    state, late = step(state, stacked[1])
    losses = np.concatenate([late["loss"], step.finish()["loss"]])
    np.testing.assert_allclose(losses, expected[2], rtol=1e-6)
    assert_trees((state.model, state.nn_state), expected[:2])


def test_micro_batches_pass_the_state_on():
    def in_two(model, state, opt_state, batch):
        value_and_grad, found = eqx.filter_value_and_grad(_stateful, has_aux=True), []
        for i in range(2):
            (loss, state), grads = value_and_grad(model, state, jax.tree.map(lambda x, i=i: x[i::2], batch), None)
            found.append((loss, grads))
        loss, grads = jax.tree.map(lambda *x: sum(x) / 2, *found)
        updates, opt_state = TX.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    wanted = _own_loop(eqx.filter_jit(in_two), BATCHES[:2])
    state, losses = run(_step(accumulate=2), BATCHES[:2])
    np.testing.assert_allclose(losses, wanted[2], rtol=1e-6)
    assert_trees((state.model, state.nn_state), wanted[:2])


def test_fp16_skips_an_overflow_with_its_statistics_and_trains_on():
    """The loop by hand of arXiv:1710.03740, section 3.2, whose third batch is too large for fp16."""
    batches = [*BATCHES[:2], jax.tree.map(lambda x: x * np.float32(3e4), BATCHES[2]), BATCHES[3]]

    @eqx.filter_jit
    def by_hand(model, state, opt_state, batch, scale, finite):
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        half = lambda tree: jax.tree.map(lambda x: x.astype("float16") if eqx.is_inexact_array(x) else x, tree)  # noqa: E731

        def scaled(params):
            loss, new = _stateful(half(eqx.combine(params, rest)), state, half(batch), None)
            return loss * scale, (loss, new)

        grads, (loss, new) = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        fine = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, new_opt = TX.update(grads, opt_state)
        now = eqx.apply_updates(params, updates), new_opt, new
        params, opt_state, state = jax.tree.map(
            lambda a, b: jnp.where(fine, a, b) if eqx.is_array(a) else a, now, (params, opt_state, state)
        )
        finite = jnp.where(fine, finite + 1, 0)
        scale = jnp.where(fine, jnp.where(finite >= 2, scale * 2, scale), scale / 2)
        return eqx.combine(params, rest), state, opt_state, loss, scale, jnp.where(finite >= 2, 0, finite)

    model, nn_state = _new()
    opt_state, wanted = TX.init(eqx.filter(model, eqx.is_inexact_array)), []
    scale, finite = jnp.float32(256), jnp.int32(0)
    for batch in batches:
        before = float(scale)
        model, nn_state, opt_state, loss, scale, finite = by_hand(model, nn_state, opt_state, batch, scale, finite)
        wanted.append((float(loss), before))
    step = _step(precision=Precision("float16", LossScale(256.0, period=2)))
    state, found, skipped = step.init(), [], []
    for batch in batches:
        state, _ = step(state, batch)
        metrics = step.finish()
        found.append((float(metrics["loss"]), float(metrics["loss_scale"])))
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [False, False, True, False]
    np.testing.assert_array_equal(found, wanted)
    assert [scale for _, scale in found] == [256, 256, 512, 256]
    assert_trees((state.model, state.nn_state), (model, nn_state), 0, 0)


def test_a_killed_run_resumes_with_its_statistics(tmp_path, expected):
    step = _step()
    state, _ = run(step, BATCHES[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        resumed, _ = checkpoints.restore(_step(layout="grouped"))
        _, losses = run(_step(layout="grouped"), BATCHES[2:], state=resumed)
    assert losses == expected[2][2:]


def test_a_state_beside_the_batch_is_treated_as_one():
    with pytest.warns(RetraceWarning, match="bfloat16"):
        _, state, _ = _call_style(precision="bf16")
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"int32", "bfloat16"}
    with pytest.raises(ConfigError, match=r"is float32\[3\]; accumulate=2 needs a first axis that it divides"):
        _call_style(accumulate=2)


def _counting(model, state, batch, key) -> Any:
    return (model["w"] * batch).sum(), {"n": state["n"] + 1}, {"seen": state["n"]}


@pytest.mark.parametrize(
    ("loss_fn", "nn_state", "message"),
    [
        (lambda m, s, b, k: (m["w"] * b).sum(), {"n": jnp.zeros(())}, "a loss that is given nn_state returns"),
        (lambda m, s, b, k: ((m["w"] * b).sum(), s, {}, 1), {"n": jnp.zeros(())}, "loss_fn returned a tuple of 4; a l"),
        (lambda m, s, b, k: ((m["w"] * b).sum(), {}), {"n": jnp.zeros(())}, "loss_fn changed the structure of nn_sta"),
        (_counting, {"n": 0}, "the structure of nn_state, whose numbers that vary must be arrays"),
        (_counting, {"n": jnp.zeros((), "int8")}, r"loss_fn turned nn_state\['n'\] from int8\[\] into int32"),
    ],
)
def test_what_a_stateful_loss_may_return(loss_fn, nn_state, message):
    if "int8" in message:
        loss_fn = lambda m, s, b, k: (_counting(m, s, b, k)[0], {"n": s["n"].astype("int32")})  # noqa: E731
    step = TrainStep(loss_fn, optax.sgd(0.1), {"w": jnp.ones(3)}, nn_state=nn_state)
    with pytest.raises(ConfigError, match=message):
        step(step.init(), np.ones(3, "f"))


def test_any_tree_may_be_a_state_and_another_may_start():
    step = TrainStep(_counting, optax.sgd(0.1), {"w": jnp.ones(3)}, nn_state={"n": np.int32(5)})
    state, _ = step(step.init(), np.ones(3, "f"))
    assert (state.nn_state["n"], step.finish()["seen"]) == (6, 5)
    state, _ = step(step.init(nn_state={"n": jnp.int32(9)}), np.ones(3, "f"))
    assert state.nn_state["n"] == 10
    with pytest.raises(ConfigError, match="nn_state or opt_state: it holds shapes instead of arrays"):
        step.init(nn_state=jax.eval_shape(lambda: {"n": jnp.int32(9)}))
    with pytest.raises(ConfigError, match=r"init\(\) turned nn_state\['n'\] from int32\[\] into int32\[2\]"):
        step.init(nn_state={"n": jnp.zeros(2, "int32")})


def test_a_state_among_the_models_trained_parts_is_refused():
    def loss_fn(both, batch, key):
        return _stateful(both[0], both[1], batch, key)[0]

    with pytest.raises(ConfigError, match=r"wrt takes an equinox\.nn\.State.*TrainStep\(\.\.\., nn_state=state\)"):
        TrainStep(loss_fn, TX, _new())
    model, state = _new()
    step = TrainStep(loss_fn, TX, (model, state), wrt=(eqx.is_inexact_array, False))
    trained, _ = step(step.init(), batch_of(0))
    step.finish()
    assert_trees(trained.model[1], state)  # frozen
    assert not np.array_equal(trained.model[0].last.weight, model.last.weight)

"""Optax's wrappers and its less plain optimizers, in the grouped layout, beside the plain loop."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import (
    Optimizer,
    TrainStep,
    cached_filter_jit,
    make_train_step,
    make_train_step_with_partition,
)
from tests.step.jax.nets import Net, assert_trees, batch_of, plain_loop, run, squared


def _kinds(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def _sam():
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), ascent)


OPTIMIZERS = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), optax.adam(1e-2)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, _kinds
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "sam": lambda: _sam(),
    "sam in a chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), _sam()),
    "empty": lambda: optax.sgd(0.1),
}


# Their state is of a kind that another has, too.
LIKE_OTHERS = ("masked", "apply_if_finite", "sam in a chain")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.thorough) if x in LIKE_OTHERS else x for x in OPTIMIZERS]
)
def test_agrees_with_the_plain_loop(name):
    batches = [batch_of(i) for i in range(3)]
    with jax.numpy_dtype_promotion("standard"):
        trained, opt_state, losses = plain_loop(Net(0), OPTIMIZERS[name](), batches)
        step = TrainStep(squared, OPTIMIZERS[name](), Net(0), layout="grouped", on_retrace="raise")
        state, mine = run(step, batches)
    assert_trees(state.model, trained)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    assert step.traces == 1


def test_sam_in_the_other_styles():
    batches = [batch_of(i) for i in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        trained, _, _ = plain_loop(Net(0), _sam(), batches)
        state, _ = run(TrainStep(squared, _sam(), Net(0)), batches)
        call, explicit = make_train_step(squared), make_train_step_with_partition(squared, _sam(), Net(0))
        model, optimizer = Net(0), Optimizer.create(_sam(), Net(0))
        params, opt_state = explicit.params, explicit.opt_state
        for batch in batches:
            model, optimizer, _ = call(model, optimizer, batch)
            params, opt_state, _ = explicit(params, opt_state, batch)
    for found in (state.model, model, explicit.combine(params)):
        assert_trees(found, trained)


NEEDY = {
    "lbfgs": (lambda: optax.lbfgs(), "'grad' and 'value_fn'"),
    "line search": (
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
        "'grad' and 'value_fn'",
    ),
    "sophia": (lambda: optax.contrib.sophia(1e-2), "obj_fn must be provided"),
    "opaque sam": (
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        "grad_fn must be provided",
    ),
}


@pytest.mark.parametrize("name", NEEDY)
def test_what_evaluates_the_loss_again_is_refused(name):
    make, lacks = NEEDY[name]
    message = rf"and the loss as value, and needs more \(.*{lacks}.*a step of your own, under cached_filter_jit"
    step = TrainStep(squared, make(), Net(0))
    with pytest.raises(ConfigError, match=message):
        step(step.init(), batch_of(0))
    with pytest.raises(ConfigError, match=message):
        make_train_step(squared)(Net(0), Optimizer.create(make(), Net(0)), batch_of(0))


def test_a_line_search_in_a_step_of_ones_own():
    tx = optax.lbfgs()

    def step(model, opt_state, batch):
        params, rest = eqx.partition(model, eqx.is_inexact_array)

        def value_fn(params):
            return squared(eqx.combine(params, rest), batch, None)

        loss, grads = jax.value_and_grad(value_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss, grad=grads, value_fn=value_fn)
        return eqx.apply_updates(model, updates), opt_state, loss

    found = []
    with jax.numpy_dtype_promotion("standard"):
        for wrap in (eqx.filter_jit, cached_filter_jit):
            model, jitted = Net(0), wrap(step)
            opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
            losses = []
            for _ in range(3):
                model, opt_state, loss = jitted(model, opt_state, batch_of(0))
                losses.append(float(loss))
            found.append((model, losses))
    assert_trees(*(model for model, _ in found))
    assert found[1][1] == sorted(found[1][1], reverse=True)


def test_an_optimizer_that_needs_the_loss_says_so_where_it_gets_none():
    model, tx = Net(0), optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    optimizer, grads = Optimizer.create(tx, model), eqx.filter_grad(squared)(model, batch_of(0), None)
    with pytest.raises(ConfigError, match=r"and no loss, and needs more \(.*'value'.*optimizer\(grads, model, loss\)"):
        optimizer(grads, model)
    with jax.numpy_dtype_promotion("standard"):
        optimizer(grads, model, squared(model, batch_of(0), None))

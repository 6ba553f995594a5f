"""Optax's wrappers and its less plain optimizers, in the grouped layout, beside the plain loop."""

import jax
import numpy as np
import optax
import pytest

from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, assert_trees, batch_of, plain_loop, run, squared


def _kinds(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


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
    "empty": lambda: optax.sgd(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
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

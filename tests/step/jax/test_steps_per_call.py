import jax
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, run, squared


def _stacked(batches):
    return jax.tree.map(lambda *x: np.stack(x), *batches)


@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_several_steps_in_a_call_are_as_many_calls(layout):
    batches, key = [batch_of(i) for i in range(6)], jax.random.key(1)
    keys = [jax.random.split(k, 3) for k in jax.random.split(key, 2)]
    single, losses = run(TrainStep(squared, adam(), Net(0), ema=0.9), batches, [k for pair in keys for k in pair])
    step = TrainStep(squared, adam(), Net(0), ema=0.9, layout=layout, steps_per_call=3)
    state, late = step(step.init(), _stacked(batches[:3]), jax.random.split(key, 2)[0])
    assert not late
    state, late = step(state, jax.device_put(_stacked(batches[3:])), jax.random.split(key, 2)[1])
    np.testing.assert_allclose(np.concatenate([late["loss"], step.finish()["loss"]]), losses, rtol=1e-5)
    assert (late.step, state.step, step.traces) == (3, 6, 1)
    assert_trees(state.model, single.model)
    assert_trees(state.ema_model, single.ema_model)
    assert_trees(state.opt_state, single.opt_state)


def test_the_first_bad_step_of_a_call_is_named():
    step = TrainStep(squared, optax.sgd(0.1), Net(0), steps_per_call=3)
    batches = [batch_of(i) for i in range(3)]
    batches[1]["y"][:] = np.nan
    step(step.init(), _stacked(batches))
    with pytest.raises(FloatingPointError, match="the loss of step 2 is nan"):
        step.finish()


def test_a_batch_of_another_number_of_steps():
    step = TrainStep(squared, optax.sgd(0.1), Net(0), steps_per_call=3)
    with pytest.raises(ConfigError, match=r"batch\['x'\] is float32\[6,3\]; steps_per_call=3 needs as many batches"):
        step(step.init(), batch_of(0))
    with pytest.raises(ConfigError, match="steps_per_call=0: expected an integer of 1 or more"):
        TrainStep(squared, optax.sgd(0.1), Net(0), steps_per_call=0)

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from fullstride.step.jax.checkpoint import Checkpoints
from tests.step.jax.nets import Net, adam, batch_of, run, squared


def _same(a, b):
    pairs = zip(jax.tree.leaves(a.carry), jax.tree.leaves(b.carry), strict=True)
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def test_resuming_is_exact_and_goes_from_one_layout_to_the_other(tmp_path):
    batches = [batch_of(i) for i in range(4)]
    step = TrainStep(squared, adam(), Net(0), ema=0.9, precision="fp16")
    other = TrainStep(squared, adam(), Net(1), ema=0.9, precision="fp16", layout="grouped")
    state, _ = run(step, batches[:2])
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, {"batch": 2, "name": "x"})
        end, _ = run(step, batches[2:], state=state)
        resumed, extra = checkpoints.restore(step)
        assert (resumed.step, extra) == (2, {"batch": 2, "name": "x"})
        moved, _ = checkpoints.restore(other)
    again, _ = run(step, batches[2:], state=resumed)
    assert _same(again, end)
    assert again.step == 4
    assert len(moved.buffers) < len(end.buffers)
    assert jax.tree.structure(moved.model) == jax.tree.structure(end.model)
    back = TrainStep(squared, adam(), Net(0), ema=0.9, precision="fp16", layout="grouped")
    assert back.program.blueprint.same_as(other.program.blueprint)


def test_the_newest_are_kept_and_found(tmp_path):
    step = TrainStep(squared, optax.sgd(0.1), Net(0))
    state = step.init()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for i in range(3):
            state, _ = step(state, batch_of(i))
            checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.numbers() == [2, 3]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(step)[0].step == 3
        assert checkpoints.restore(step, 2)[0].step == 2
        with pytest.raises(ConfigError, match="has no checkpoint of step 1; it has steps 2, 3"):
            checkpoints.restore(step, 1)


def test_random_keys_and_fixed_arrays_are_kept(tmp_path):
    class Noisy(eqx.Module):
        w: jax.Array
        key: jax.Array
        table: jax.Array

    def model(seed):
        return Noisy(jnp.ones(2), jax.random.key(seed), jnp.arange(3) + seed)

    step = TrainStep(lambda m, b, k: jnp.sum((m.w - b) ** 2), optax.sgd(0.1), model(1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step.init(model(5)))
        state, _ = checkpoints.restore(step)
    assert state.model.key == jax.random.key(5)
    np.testing.assert_array_equal(state.model.table, [5, 6, 7])
    step(state, np.zeros(2, "f"))
    step.finish()


def test_what_does_not_fit_is_named(tmp_path):
    step = TrainStep(squared, optax.sgd(0.1), Net(0))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match="has no checkpoint of step None; it has none"):
            checkpoints.restore(step)
        checkpoints.save(step.init())
        wide = TrainStep(squared, optax.sgd(0.1), Net(0, width=4))
        with pytest.raises(
            ConfigError, match=r"params.blocks\[0\].linear.bias is float32\[5\], the step expects float32\[4\]"
        ):
            checkpoints.restore(wide)
        deep = TrainStep(squared, optax.sgd(0.1), Net(0, depth=3))
        with pytest.raises(
            ConfigError, match=r"params.blocks\[2\].linear.bias is absent, the step expects float32\[5\]"
        ):
            checkpoints.restore(deep)
    assert json.loads((tmp_path / "0" / "extra" / "metadata").read_text()) == {}


class Partly(eqx.Module):
    """A layer with no output, as a model without optional features has, and keys of nobody."""

    w: jax.Array
    none: jax.Array
    empty: jax.Array
    keys: jax.Array

    def __init__(self, seed: int, features: int = 0):
        self.w, self.none = jnp.full(3, 1.0 + seed), jnp.ones((features, 4))
        self.empty, self.keys = jnp.ones((2, 0), "int32"), jax.random.split(jax.random.key(0), 0)


def _partly(model, batch, key):
    return jnp.sum((model.w - batch) ** 2) + model.none.sum()


@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_arrays_of_no_element_come_back(tmp_path, layout):
    step = TrainStep(_partly, adam(), Partly(0), ema=0.9, layout=layout)
    state, _ = run(step, [np.zeros(3, "f")] * 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        end, _ = run(step, [np.zeros(3, "f")], state=state)
        resumed, _ = checkpoints.restore(step)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), resumed.carry) == jax.tree.map(
            lambda x: (x.shape, x.dtype), end.carry
        )
        assert (resumed.model.empty.shape, resumed.model.empty.dtype) == ((2, 0), "int32")
        assert (resumed.model.keys.shape, resumed.model.keys.dtype) == ((0,), jax.random.key(0).dtype)
        again, _ = run(step, [np.zeros(3, "f")], state=resumed)
        assert _same(again, end)
        assert step.traces == 1
        larger = TrainStep(_partly, adam(), Partly(0, 2), ema=0.9)
        with pytest.raises(ConfigError, match=r"ema.none is absent, the step expects float32\[2,4\]"):
            checkpoints.restore(larger)


def test_a_state_that_is_no_newer_is_not_left_out_in_silence(tmp_path):
    step = TrainStep(squared, optax.sgd(0.1), Net(0), donate=False)
    first, _ = step(step.init(), batch_of(0))
    second, _ = step(first, batch_of(1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(second)
        for state in (first, second):
            message = f"has a checkpoint of step 2 and the state is of step {state.step}; expected a later one"
            with pytest.raises(ConfigError, match=message):
                checkpoints.save(state)
        third, _ = step(second, batch_of(2))
        checkpoints.save(third)
        assert checkpoints.numbers() == [2, 3]

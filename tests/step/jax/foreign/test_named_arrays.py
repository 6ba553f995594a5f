"""Arrays that know their axes by name and size, as haliax's and levanter's do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.step.jax import TrainStep
from tests.step.jax.nets import assert_trees, plain_loop, run


class Named(eqx.Module):
    """An array with its axes, (name, size) each; like `haliax.NamedArray` it checks what it is made of."""

    array: jax.Array
    axes: tuple = eqx.field(static=True)

    def __check_init__(self):
        if hasattr(self.array, "shape") and self.array.shape != tuple(size for _, size in self.axes):
            raise ValueError(f"the shape {self.array.shape} does not match the axes {self.axes}")

    def dot(self, other, axis):
        return Named(jnp.tensordot(self.array, other.array, 1), tuple(a for a in self.axes + other.axes if a != axis))


IN, HID, OUT = ("in", 3), ("hid", 4), ("out", 2)


class Net(eqx.Module):
    first: Named
    second: Named

    def __init__(self):
        a, b = jax.random.split(jax.random.key(0))
        self.first = Named(jax.random.normal(a, (3, 4)), (IN, HID))
        self.second = Named(jax.random.normal(b, (4, 2)), (HID, OUT))

    def __call__(self, x):
        hidden = x.dot(self.first, IN)
        return Named(jnp.tanh(hidden.array), hidden.axes).dot(self.second, HID)


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]).array - batch["y"].array) ** 2)


def batch_of(seed):
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.normal(size=(6, n)), jnp.float32) for n in (3, 2))
    return {"x": Named(x, (("batch", 6), IN)), "y": Named(y, (("batch", 6), OUT))}


BATCHES = [batch_of(i) for i in range(2)]


def test_named_arrays_train_as_in_the_loop_by_hand():
    trained, opt_state, losses = plain_loop(Net(), optax.adam(1e-2), BATCHES, loss_fn=loss_fn)
    state, found = run(TrainStep(loss_fn, optax.adam(1e-2), Net(), layout="grouped"), BATCHES)
    assert found == losses
    assert_trees((state.model, state.opt_state), (trained, opt_state), 0, 0)
    several = TrainStep(loss_fn, optax.adam(1e-2), Net(), steps_per_call=2)
    several(several.init(), jax.tree.map(lambda *x: jnp.stack(x), *BATCHES))
    np.testing.assert_allclose(several.finish()["loss"], losses, rtol=1e-6)


def test_micro_batches_of_them_are_refused_in_words():
    step = TrainStep(loss_fn, optax.adam(1e-2), Net(), accumulate=2)
    with pytest.raises(ValueError, match="does not match the axes") as raised:
        step(step.init(), BATCHES[0])
    assert any("accumulate=2 divides the first axis" in note for note in raised.value.__notes__)

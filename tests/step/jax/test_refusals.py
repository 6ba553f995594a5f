import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, adam, batch_of, squared


def _first_call(loss_fn, batch=None, **settings):
    step = TrainStep(loss_fn, optax.sgd(0.1), Net(0), **settings)
    step(step.init(), batch_of(0) if batch is None else batch)


@pytest.mark.parametrize(
    ("returned", "settings", "message"),
    [
        (lambda loss: loss[None], {}, r"loss_fn returned a loss of float32\[1\]; expected a scalar: take its mean"),
        (lambda loss: loss.astype("int32"), {}, r"loss_fn returned a loss of int32\[\]; expected a floating dtype"),
        (lambda loss: None, {}, "loss_fn returned a NoneType; expected a scalar array"),
        (lambda loss: loss, {"has_aux": True}, r"float32\[\], but has_aux=True: expected the pair"),
        (lambda loss: (loss, {}), {"has_aux": False}, "loss_fn returned a tuple; expected a scalar"),
        (lambda loss: (loss, {"loss": loss}), {}, "aux has loss, which the step reports itself"),
        (lambda loss: (loss, {"who": "me"}), {}, r"aux\['who'\] is a str; expected arrays or numbers"),
    ],
)
def test_what_a_loss_may_return(returned, settings, message):
    with pytest.raises(ConfigError, match=message):
        _first_call(lambda m, b, k: returned(squared(m, b, k)), **settings)


def test_a_batch_that_accumulation_does_not_divide():
    with pytest.raises(ConfigError, match=r"batch\['x'\] is float32\[6,3\]; accumulate=4 needs a first axis"):
        _first_call(squared, accumulate=4)
    with pytest.raises(ConfigError, match=r"batch\['t'\] is float32\[\]; accumulate=2"):
        _first_call(squared, batch_of(0) | {"t": np.float32(1)}, accumulate=2)


def test_a_batch_of_strings():
    with pytest.raises(ConfigError, match=r"batch\['names'\]\[1\] is a str; expected arrays or numbers"):
        _first_call(squared, batch_of(0) | {"names": [1, "a"]})


def test_errors_of_the_users_own_pass_through():
    with pytest.raises(KeyError, match="absent"):
        _first_call(lambda m, b, k: b["absent"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: expected an integer of 1 or more"),
        ({"ema": 1.5}, "ema=1.5: expected a decay between 0 and 1"),
        ({"precision": "bf61"}, "precision=bf61: expected one of bf16, .*did you mean bf16"),
        ({"on_retrace": "scream"}, "on_retrace=scream: expected one of"),
        ({"wrt": lambda x: False}, "model: no leaf of this Net is trained; check the model and wrt"),
        ({"wrt": eqx.is_array}, r"wrt takes model.ids, int32\[5\]; only floating arrays have gradients"),
        ({"wrt": (True, False)}, "wrt is no prefix of the model's tree"),
        ({"model": {"f": jnp.tanh}}, "model: no leaf of this dict is trained"),
    ],
)
def test_settings_that_cannot_be(change, message):
    arguments = {"loss_fn": squared, "optimizer": adam(), "model": Net(0)} | change
    with pytest.raises(ConfigError, match=message):
        TrainStep(**arguments)


def test_an_optimizer_that_changes_a_dtype():
    def update(updates, state, params=None):
        return jax.tree.map(jnp.negative, updates), jax.tree.map(lambda x: x.astype("bfloat16"), state)

    wrong = optax.GradientTransformation(lambda params: params, update)
    step = TrainStep(squared, wrong, Net(0))
    message = r"the optimizer turned opt_state.first.weight from float32\[5,3\] into bfloat16\[5,3\]"
    with pytest.raises(ConfigError, match=message):
        step(step.init(), batch_of(0))


def test_init_from_a_model_of_another_kind():
    step = TrainStep(squared, adam(), Net(0))
    with pytest.raises(ConfigError, match="its structure is not that of the model of this step"):
        step.init(Net(0, depth=3))
    wide = eqx.tree_at(lambda m: m.last.bias, Net(0), jnp.zeros(3))
    with pytest.raises(ConfigError, match=r"turned params.last.bias from float32\[2\] into float32\[3\]"):
        step.init(wide)

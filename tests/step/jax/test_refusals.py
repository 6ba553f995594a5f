import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from fullstride.step.jax.update import StepRecipe
from tests.step.jax.nets import Net, adam, batch_of, squared


def _first_call(loss_fn, batch=None, key=None, **settings):
    step = TrainStep(loss_fn, optax.sgd(0.1), Net(0), **settings)
    step(step.init(), batch_of(0) if batch is None else batch, key)


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


def test_a_key_that_is_none():
    with pytest.raises(ConfigError, match=r"key is int32\[\]; expected one of jax.random.key"):
        _first_call(squared, accumulate=2, key=3)


def _deleting(model, batch, key):
    raise ValueError("a column was deleted")


def test_errors_of_the_users_own_pass_through():
    with pytest.raises(KeyError, match="absent"):
        _first_call(lambda m, b, k: b["absent"])
    with pytest.raises(ValueError, match="a column was deleted"):
        _first_call(_deleting)
    with pytest.raises(TypeError, match="dot_general") as raised:
        _first_call(squared, {"x": np.ones((6, 4), "f"), "y": np.ones((6, 2), "f")})
    assert "The step was called with batch['x'] float32[6,4], batch['y'] float32[6,2]." in raised.value.__notes__


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: expected an integer of 1 or more"),
        ({"steps_per_call": 0}, "steps_per_call=0: expected an integer of 1 or more"),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": True}, "accumulate=True: expected an integer"),
        ({"accumulate": 1.5}, "accumulate=1.5: expected an integer"),
        ({"loss_fn": None}, "loss_fn is a NoneType; expected a function of"),
        ({"optimizer": optax.adam}, "optimizer is a function; expected optax's"),
        ({"ema": "0.9"}, "ema=0.9: expected a decay"),
        ({"sharding": "fsdp"}, r"sharding is a str; expected data_parallel\(\)"),
    ],
)
def test_settings_of_another_type(change, message):
    # As without the tests' own type checker, which is there first.
    recipe = object.__new__(StepRecipe)
    for name, value in ({"loss_fn": squared, "optimizer": adam(), "sharding": None} | change).items():
        object.__setattr__(recipe, name, value)
    with pytest.raises(ConfigError, match=message):
        recipe.__post_init__()


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
    with pytest.raises(ConfigError, match=r"model.last.bias is float32\[3\]; this step was built for float32\[2\]"):
        step.init(wide)
    ids = eqx.tree_at(lambda m: m.ids, Net(0), jnp.arange(4))
    with pytest.raises(ConfigError, match=r"model.ids is int32\[4\]; this step was built for int32\[5\]"):
        step.init(ids)
    with pytest.raises(ConfigError, match=r"shapes instead of arrays; give init\(\) the model itself"):
        TrainStep(squared, adam(), eqx.filter_eval_shape(Net, 0)).init()

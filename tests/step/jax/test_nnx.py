"""Models of Flax NNX, beside the loop that Flax's documentation teaches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import Optimizer, TrainStep
from fullstride.step.jax.checkpoint import Checkpoints
from tests.step.jax.nets import batch_of, run

nnx: Any = pytest.importorskip("flax.nnx")


@pytest.fixture(autouse=True)
def _promoting():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Normed(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.shift = jnp.ones(4)

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x) + self.shift)))


def loss_fn(model, batch, key=None):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(), {"rows": jnp.asarray(len(batch["x"]))}


BATCHES, TX = [batch_of(i) for i in range(4)], optax.adam(1e-2)


def _made(model: Any) -> Any:
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


@nnx.jit
def _step(model, optimizer, batch):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss


def _by_hand(model: Any, optimizer: Any, batches: Any = BATCHES) -> list[float]:
    return [float(_step(model, optimizer, batch)) for batch in batches]


def _same(a: Any, b: Any) -> None:
    """Equal to the last bit: modules or optimizers."""
    for x, y in zip(*(jax.tree.leaves(nnx.as_pure(nnx.state(m))) for m in (a, b)), strict=True):
        x, y = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (x, y))
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def by_hand():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = Normed()
        optimizer = _made(model)
        return model, optimizer, _by_hand(model, optimizer)


@pytest.mark.parametrize("layout", [pytest.param("flat", marks=pytest.mark.thorough), "grouped"])
def test_a_module_trains_as_in_the_loop_by_hand_and_is_written_back(layout, by_hand, tmp_path):
    model = Normed()
    optimizer = _made(model)
    step = TrainStep(loss_fn, TX, model, layout=layout, on_retrace="raise")
    state, losses = run(step, BATCHES[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        state, _ = checkpoints.restore(step)
    state, rest = run(step, BATCHES[2:], state=state)
    assert [*losses, *rest] == by_hand[2]
    assert step.finish()["rows"] == 6
    _same(state.model, by_hand[0])
    _same(model, Normed())  # until it is asked for
    state.write_to(model, optimizer)
    _same(model, by_hand[0])
    _same(optimizer, by_hand[1])
    # What was written is the user's own: the next step donates the state's.
    step(state, BATCHES[0])
    assert _by_hand(model, optimizer, BATCHES[:1]) == [float(step.finish()["loss"])]


def test_an_optimizer_in_the_middle_of_a_run_goes_on(by_hand):
    model = Normed()
    optimizer = _made(model)
    first = _by_hand(model, optimizer, BATCHES[:2])
    step = TrainStep(loss_fn, optimizer, model)
    state, losses = run(step, BATCHES[2:])
    assert first + losses == by_hand[2]
    assert state.step == 4
    state.write_to(model, optimizer)
    _same(optimizer, by_hand[1])
    assert optimizer.step[...] == 4
    # A start is from the module as it is by then.
    _same(step.init().model, by_hand[0])
    assert step.init().step == 4


def test_two_modules_with_an_optimizer_each_and_several_steps_of_a_call():
    def part(name):
        return lambda models, batch, key: loss_fn(models[name], batch)

    models = {"b": Normed(1), "a": Normed(2)}
    optimizers = {name: _made(m) for name, m in models.items()}
    step = TrainStep({n: part(n) for n in models}, optimizers, models, steps_per_call=2)
    state, _ = step(step.init(), jax.tree.map(lambda *x: np.stack(x), *BATCHES[:2]))
    found = step.finish()
    state.write_to(models, optimizers)
    for name, seed in (("b", 1), ("a", 2)):
        model = Normed(seed)
        optimizer = _made(model)
        assert _by_hand(model, optimizer, BATCHES[:2]) == list(found[f"{name}/loss"])
        _same(models[name], model)
        _same(optimizers[name], optimizer)


class Head(nnx.Module):
    def __init__(self):
        self.body, self.head = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.body(x))


def test_a_filter_trains_a_part():
    model = Head()
    step = TrainStep(loss_fn, optax.sgd(0.1), model, wrt=nnx.All(nnx.Param, nnx.PathContains("head")))
    state, _ = run(step, BATCHES[:1])
    _same(state.model.body, model.body)
    assert not np.array_equal(state.model.head.kernel[...], model.head.kernel[...])


def _changing(model, batch, key):
    model.head.kernel[...] = model.head.kernel[...] * 2
    return loss_fn(model, batch)


def _adding(model, batch, key):
    model.seen = nnx.Intermediate(batch["x"].mean())
    return loss_fn(model, batch)


def test_what_a_step_would_lose_is_refused():
    for loss, message in (
        (_changing, r"loss_fn changed model\['head'\]\['kernel'\], which the optimizer trains"),
        (_adding, r"its graphdef is not the one .* nnx\.Intermediate, out again with nnx\.pop"),
    ):
        step = TrainStep(loss, optax.sgd(0.1), Head())
        with pytest.raises(ConfigError, match=message):
            step(step.init(), BATCHES[0])
    with pytest.raises(ConfigError, match=r"a flax\.nnx\.Module holds its state itself"):
        TrainStep(loss_fn, optax.sgd(0.1), Head(), nn_state={"n": jnp.ones(())})
    with pytest.raises(ConfigError, match="its graphdef is not the one"):
        TrainStep(loss_fn, optax.sgd(0.1), Normed()).init(Head())
    with pytest.raises(ConfigError, match=r"model holds a int beside a flax\.nnx\.Module"):
        TrainStep(loss_fn, optax.sgd(0.1), {"a": Head(), "b": 3})
    for misplaced in (lambda: TrainStep(loss_fn, optax.sgd(0.1), [Head()]), lambda: Optimizer.create(TX, Head())):
        with pytest.raises(ConfigError, match=r"holds a flax\.nnx\.Module; expected it alone, or in a dict"):
            misplaced()
    with pytest.raises(ConfigError, match=r"only a flax\.nnx\.Module can be written to"):
        TrainStep(lambda m, b, k: m["w"].sum(), optax.sgd(0.1), {"w": jnp.ones(2)}).init().write_to(None)

"""Losses that are a sum over a weight: what is accumulated is the whole batch's, in fp64."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import Mean, Optimizer, Precision, TrainStep, make_train_step, make_train_step_with_partition
from tests.step.jax.nets import Net, assert_trees, batch_of, run, squared


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def _net(seed: int, dtype: str = "float64") -> Net:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, Net(seed))


def _batch(seed: int, counts: tuple[int, ...] = (5, 1, 0, 9, 2, 7), dtype: str = "float64") -> dict[str, Any]:
    """Rows of which so many of nine outputs count, in any order."""
    rng = np.random.default_rng(seed)
    rows, most = len(counts), 9
    counted = np.stack([rng.permutation(most) < n for n in counts])
    y = rng.normal(size=(rows, most, 2)).astype(dtype)
    return {"x": rng.normal(size=(rows, most, 3)).astype(dtype), "y": y, "counted": counted}


def _errors(model: Any, batch: Any) -> Any:
    found = jnp.sum((jax.vmap(jax.vmap(model))(batch["x"]) - batch["y"]) ** 2, -1)
    return jnp.where(batch["counted"], found, jnp.zeros_like(found))


def weighed(model: Any, batch: Any, key: Any) -> Any:
    errors, count = _errors(model, batch), batch["counted"].sum()
    return Mean(errors.sum(), count), {"small": Mean((errors < 1).sum(where=batch["counted"]), count), "rows": count}


def _whole(model: Any, batch: Any) -> Any:
    """The mean over all that counts in a batch, written out."""
    errors = jax.vmap(jax.vmap(model))(batch["x"]) - batch["y"]
    return (errors**2).sum(-1)[np.nonzero(batch["counted"])].mean()


@pytest.mark.parametrize(("count", "layout"), [(1, "flat"), (2, "flat"), (3, "grouped"), (6, "flat")])
def test_accumulated_gradients_are_those_of_the_whole_batch(wide, seed, count, layout):
    model, batch = _net(seed), _batch(seed)
    step = TrainStep(weighed, optax.sgd(1.0), model, accumulate=count, layout=layout)
    state, (loss,) = run(step, [batch])
    expected, grads = eqx.filter_value_and_grad(_whole)(model, batch)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    moved = jax.tree.map(
        lambda before, after: before - after, *(eqx.filter(m, eqx.is_inexact_array) for m in (model, state.model))
    )
    assert_trees(moved, grads, 1e-10, 1e-12)
    errors = np.asarray(_errors(model, batch))[batch["counted"]]
    metrics = step.finish()
    assert metrics["small"] == pytest.approx((errors < 1).mean(), rel=1e-12)
    assert metrics["rows"] == 24


def test_a_mean_that_divides_by_itself_is_another_one(wide):
    # What the test above would not see if all parts had as much to count.
    def divided(model, batch, key):
        return weighed(model, batch, key)[0].value

    batch = _batch(0, (5, 1, 3, 9, 2, 7))
    (whole,), (parts,) = (run(TrainStep(divided, optax.sgd(0.1), _net(0), accumulate=n), [batch])[1] for n in (1, 6))
    assert abs(parts - whole) > 1e-3 * whole


def test_the_other_styles_accumulate_alike(wide):
    model, batch, tx = _net(3), _batch(3), optax.sgd(0.5)
    state, (loss,) = run(TrainStep(weighed, tx, model), [batch])
    explicit = make_train_step_with_partition(weighed, tx, model, accumulate=3)
    params, _, aux = explicit(explicit.params, explicit.opt_state, batch)
    assert_trees(explicit.combine(params), state.model, 1e-10, 1e-12)
    step = make_train_step(lambda *given: weighed(*given)[0], accumulate=3)
    trained, _, mine = step(_net(3), Optimizer.create(tx, model), batch, None)
    assert_trees(trained, state.model, 1e-10, 1e-12)
    assert float(mine) == pytest.approx(loss, rel=1e-12)
    assert aux["small"].shape == ()


def test_where_nothing_counts_loss_and_gradient_are_zero(wide):
    model, batch = _net(1), _batch(1, (0, 0))
    for count in (1, 2):
        step = TrainStep(weighed, optax.sgd(1.0), model, accumulate=count, grad_norm=True)
        state, (loss,) = run(step, [batch])
        assert (loss, step.finish()["grad_norm"], step.finish()["small"]) == (0, 0, 0)
        assert_trees(state.model, model, 0, 0)


def test_a_total_over_no_weight_is_no_number():
    step = TrainStep(lambda m, b, k: Mean(squared(m, b, k), 0), optax.sgd(1.0), Net(0), accumulate=2)
    with pytest.raises(FloatingPointError, match="the loss of step 1 is inf"):
        run(step, [batch_of(0)])


def test_equal_weights_are_a_plain_mean(seed):
    batches = [batch_of(seed + i) for i in range(2)]
    tx = optax.adam(1e-2)
    plain, losses = run(TrainStep(squared, tx, Net(seed), accumulate=3), batches)
    equal = TrainStep(lambda m, b, k: Mean(2 * squared(m, b, k), 2), tx, Net(seed), accumulate=3)
    state, mine = run(equal, batches)
    assert_trees(state.model, plain.model)
    np.testing.assert_allclose(mine, losses, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", Precision("float16", 64.0)])
def test_short_numbers_weigh_in_fp32(precision):
    batch = _batch(0, dtype="float32")
    steps = [TrainStep(weighed, optax.sgd(0.1), _net(0, "float32"), accumulate=n, precision=precision) for n in (1, 3)]
    (whole, _), (parts, _) = (run(step, [batch] * 3) for step in steps)
    assert_trees(parts.model, whole.model, 0.02, 2e-3)


def test_no_gradient_flows_through_the_weight():
    gradient = jax.grad(lambda x: Mean(x**2, x).value)(3.0)
    assert gradient == pytest.approx(2.0)


def test_numbers_of_python_are_counts_and_means_too():
    def counted(model, batch, key):
        return squared(model, batch, key), {"rows": 3, "half": 0.5, "share": Mean(1, 4)}

    step = TrainStep(counted, optax.sgd(0.1), Net(0), accumulate=2)
    run(step, [batch_of(0)])
    metrics = step.finish()
    assert (metrics["rows"], metrics["half"], metrics["share"]) == (6, 0.5, 0.25)


@pytest.mark.parametrize("kind", [int, float, np.int64, np.float32, np.asarray, jnp.asarray])
def test_a_weight_is_a_number_of_any_kind(kind):
    step = TrainStep(lambda m, b, k: Mean(squared(m, b, k), kind(4)), optax.sgd(0.1), Net(0))
    _, (loss,) = run(step, [batch_of(0)])
    assert loss == pytest.approx(float(squared(Net(0), batch_of(0), None)) / 4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: Mean(loss[None], 1), r"a Mean with a total of float32\[1\]; expected a scalar"),
        (lambda loss: Mean(loss.astype("int32"), 1), r"a Mean with a total of int32\[\]; expected a floating dtype"),
        (lambda loss: Mean(None, 1), "returned a NoneType; expected a scalar array or a Mean"),
        (lambda loss: Mean(loss, None), "a Mean with a weight of a NoneType; expected one real number"),
        (lambda loss: Mean(loss, True), "a Mean with a weight of a bool; expected one real number"),
        (lambda loss: Mean(loss, np.asarray(1j)), r"a Mean with a weight of complex128\[\]; expected one real number"),
        (lambda loss: Mean(loss, np.asarray("1")), r"a Mean with a weight of str\d*\[\]; expected one real number"),
        (lambda loss: Mean(loss, np.ones(2)), r"a Mean with a weight of float64\[2\]; expected one real number"),
        (lambda loss: Mean(loss, jnp.ones(2)), r"a Mean with a weight of float32\[2\]; expected one real number"),
    ],
)
def test_what_a_mean_may_hold(returned, message):
    step = TrainStep(lambda m, b, k: returned(squared(m, b, k)), optax.sgd(0.1), Net(0))
    with pytest.raises(ConfigError, match=message):
        step(step.init(), batch_of(0))

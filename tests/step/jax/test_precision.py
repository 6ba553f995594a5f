import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import LossScale, Precision, TrainStep
from fullstride.step.jax.precision import ScaleState
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, run, squared


def test_bf16_computes_in_bf16_and_keeps_fp32(seed):
    seen = {}

    def looked(model, batch, key):
        seen.update(weight=model.first.weight.dtype, x=batch["x"].dtype, ids=model.ids.dtype)
        return squared(model, batch, key)

    model, batch = Net(seed), batch_of(seed)
    step = TrainStep(looked, optax.sgd(0.1), model, precision="bf16")
    state, (loss,) = run(step, [batch])
    assert seen == {"weight": jnp.bfloat16, "x": jnp.bfloat16, "ids": jnp.int32}
    assert {x.dtype for x in state.buffers} == {jnp.dtype("float32"), jnp.dtype("int32")}
    low = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_inexact_array(x) else x, (model, batch))
    expected, grads = eqx.filter_jit(eqx.filter_value_and_grad(squared))(low[0], low[1], None)
    assert loss == float(expected)
    moved = (np.asarray(model.last.weight) - np.asarray(state.model.last.weight)) / 0.1
    np.testing.assert_allclose(moved, np.asarray(grads.last.weight, "f"), rtol=2e-2, atol=1e-3)


def test_a_batch_can_keep_its_dtype():
    def looked(model, batch, key):
        assert batch["y"].dtype == jnp.float32
        return squared(model, jax.tree.map(lambda x: x.astype("bfloat16"), batch), key).astype("float32")

    run(TrainStep(looked, optax.sgd(0.1), Net(0), precision=Precision("bfloat16", cast_batch=False)), [batch_of(0)])


@pytest.mark.parametrize("scale", [1024.0, LossScale(1024.0)])
def test_scaling_changes_nothing_where_nothing_underflows(seed, scale):
    batches = [batch_of(seed + i) for i in range(2)]
    plain, losses = run(TrainStep(squared, adam(), Net(seed)), batches)
    scaled, same = run(TrainStep(squared, adam(), Net(seed), precision=Precision(loss_scale=scale)), batches)
    assert_trees(scaled.model, plain.model)
    np.testing.assert_allclose(same, losses, rtol=1e-6)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    def loss(model, batch, key):
        return jnp.sum(model["w"] * batch)

    precision = Precision("float16", LossScale(2.0**14, period=2))
    step = TrainStep(loss, optax.adam(0.1), {"w": jnp.ones(3)}, precision=precision, ema=0.5)
    state = step.init()
    kept = jax.tree.map(np.asarray, (state.model, state.opt_state, state.ema_model))
    # The gradient is the batch times the scale: 8 times 2^14 is above what fp16 holds.
    state, _ = step(state, np.full(3, 8.0, "f"))
    metrics = step.finish()
    assert metrics["skipped"]
    assert metrics["loss_scale"] == 2.0**14
    assert_trees(jax.tree.map(np.asarray, (state.model, state.opt_state, state.ema_model)), kept, 0, 0)
    scales = []
    for _ in range(4):
        state, _ = step(state, np.full(3, 1.0, "f"))
        scales.append(float(step.finish()["loss_scale"]))
    assert scales == [2.0**13, 2.0**13, 2.0**14, 2.0**14]
    assert not np.allclose(state.model["w"], 1)
    assert state.step == 5


@pytest.mark.parametrize("scale", [2.0**18, LossScale(2.0**15, period=1)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scale_beyond_fp16_is_divided_out_of_fp16_parameters(scale, accumulate):
    batch = np.random.default_rng().uniform(1e-3, 2e-2, (4, 3)).astype("float16")

    def loss(model, batch, key):
        return jnp.mean(batch.astype("float32") @ model["w"].astype("float32")) * 1e-3

    model = {"w": jnp.ones(3, "float16")}
    made = {"precision": Precision("float16", scale), "grad_norm": True, "accumulate": accumulate}
    step = TrainStep(loss, optax.sgd(2.0**10), model, **made)
    state, metrics = step.init(), {}
    for taken in range(1, 5):
        state, _ = step(state, batch)
        expected = 1e-3 * batch.astype("f").mean(0)
        metrics = step.finish()
        assert not metrics.get("skipped", False)
        np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(expected), rtol=1e-2)
        moved = 1 - np.asarray(state.model["w"], "f")
        np.testing.assert_allclose(moved, taken * 2.0**10 * expected, atol=2e-3 * taken, rtol=2e-2)
    if isinstance(scale, LossScale):
        assert metrics["loss_scale"] == 2.0**18  # of the fourth step; the first took 2^15


def test_the_scale_is_not_halved_for_ever():
    precision = Precision(loss_scale=LossScale(2.0, smallest=1.0))
    state = ScaleState(jnp.asarray(2.0), jnp.asarray(0))
    for _ in range(3):
        state = precision.next_scale(state, jnp.asarray(False))
    assert float(state.scale) == 1.0


def test_the_scale_is_not_doubled_for_ever():
    def loss(model, batch, key):
        return 1e-6 * jnp.sum((model["w"] - batch) ** 2)

    # In bf16 gradients overflow with fp32, and small ones not before the scale does.
    precision = Precision("bfloat16", LossScale(2.0**125, period=1))
    step = TrainStep(loss, optax.sgd(0.1), {"w": jnp.ones(3)}, precision=precision)
    state, found = step.init(), []
    for _ in range(5):
        state, _ = step(state, np.full(3, 1.5, "f"))
        found.append((float(step.finish()["loss_scale"]), bool(step.finish()["skipped"])))
    assert found == [(2.0**125, False), (2.0**126, False), *[(2.0**127, False)] * 3]


def test_skipped_steps_leave_the_state_alone_and_do_not_raise():
    step = TrainStep(squared, adam(), Net(0), skip_nonfinite=True)
    state, _ = step(step.init(), batch_of(0))
    kept = jax.tree.map(np.asarray, eqx.filter(state.model, eqx.is_array))
    state, _ = step(state, batch_of(1) | {"y": np.full((6, 2), np.nan, "f")})
    assert step.finish()["skipped"]
    assert_trees(jax.tree.map(np.asarray, eqx.filter(state.model, eqx.is_array)), kept, 0, 0)
    step(state, batch_of(2))
    assert not step.finish()["skipped"]


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match=r"precision.compute=half: expected one of"):
        Precision("half")
    with pytest.raises(ConfigError, match=r"precision.loss_scale=-1.0: expected a number above 0"):
        Precision(loss_scale=-1.0)
    with pytest.raises(ConfigError, match="expected a finite initial >= smallest > 0 and period >= 1"):
        LossScale(initial=0.0)
    with pytest.raises(ConfigError, match="expected a finite initial"):
        LossScale(initial=float("inf"))


def test_fp64_is_fp64_or_refused():
    wide = Precision("float64")
    step = TrainStep(lambda m, b, k: jnp.sum((m["w"] - b) ** 2), optax.sgd(0.1), {"w": jnp.ones(3)}, precision=wide)
    with pytest.raises(ConfigError, match="precision.compute=float64: JAX has fp64 switched off; run jax.config"):
        step(step.init(), np.full(3, 1.1))
    with jax.enable_x64(True):
        step(step.init(), np.full(3, 1.1))
        assert float(step.finish()["loss"]) == pytest.approx(0.03, rel=1e-14)

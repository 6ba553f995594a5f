import logging
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.step.jax import TrainStep
from fullstride.step.jax.metrics import Metrics
from fullstride.step.jax.watch import MARK, REST, RunningSteps, translated
from tests.step.jax.nets import Net, adam, batch_of, squared


class Loss:
    """A loss that is there when it is told to be."""

    def __init__(self, value: float):
        self.value, self.ready, self.waited, self.copied = np.float32(value), False, False, False

    def is_ready(self) -> bool:
        return self.ready

    def devices(self):
        return [SimpleNamespace(platform="gpu")]

    def copy_to_host_async(self) -> None:
        self.copied = True

    def __array__(self, dtype=None, copy=None):
        self.waited = not self.ready
        return np.asarray(self.value)


def test_polling_never_waits_and_looks_at_what_is_done():
    watch, losses = RunningSteps(True), [Loss(1.0), Loss(float("nan")), Loss(2.0)]
    for i, loss in enumerate(losses):
        watch.add(i + 1, loss)
    watch.poll()
    assert len(watch.running) == 3
    assert all(loss.copied for loss in losses)
    losses[0].ready = True
    watch.poll()
    assert len(watch.running) == 2
    assert watch.busy()
    losses[1].ready = True
    assert not watch.busy()
    with pytest.raises(FloatingPointError, match="the loss of step 2 is nan, .*skip_nonfinite=True"):
        watch.poll()
    assert not any(loss.waited for loss in losses)


def test_draining_waits_for_all():
    watch, losses = RunningSteps(False), [Loss(1.0), Loss(float("inf"))]
    for i, loss in enumerate(losses):
        watch.add(i + 1, loss)
    watch.drain()
    assert not watch.running
    assert all(loss.waited for loss in losses)


def test_a_loss_that_is_not_finite_is_raised_by_a_later_call():
    step = TrainStep(squared, adam(), Net(0))
    state, _ = step(step.init(), batch_of(0) | {"y": np.full((6, 2), np.inf, "f")})
    state.buffers[0].block_until_ready()
    with pytest.raises(FloatingPointError, match="the loss of step 1 is inf"):
        step(state, batch_of(0))


def _checked(model, batch, key):
    loss = squared(model, batch, key)
    return eqx.error_if(loss, jnp.max(batch["x"]) > 100, "x is above 100: scale the data")


def _two_steps(step, state, batch):
    state, _ = step(state, batch)
    step(state, batch)
    step.finish()


def test_error_if_raises_with_its_message_and_logs_nothing(caplog):
    step = TrainStep(_checked, optax.sgd(0.1), Net(0))
    state, _ = step(step.init(), batch_of(0))
    step.finish()
    with caplog.at_level(logging.DEBUG), pytest.raises(eqx.EquinoxRuntimeError) as raised:
        _two_steps(step, state, batch_of(0) | {"x": np.full((6, 3), 101, "f")})
    assert str(raised.value) == "x is above 100: scale the data (step 2)"
    assert not [r for r in caplog.records if "callback" in r.name]


def test_other_errors_stay_what_they_are():
    error = ValueError("out of memory")
    assert translated(error, " (step 3)") is error


class Failed:
    def __array__(self, dtype=None, copy=None):
        raise jax.errors.JaxRuntimeError(f"INTERNAL: {MARK}too hot{REST} and where")


def test_metrics_of_a_step_that_failed_raise_its_message():
    metrics = Metrics(7, {"loss": Failed()})
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"^too hot \(step 7\)$"):
        _ = metrics["loss"]

import warnings

import jax
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import Optimizer, RetraceWarning, TrainStep, make_train_step
from fullstride.step.jax.retrace import difference
from tests.step.jax.nets import Net, adam, batch_of, squared


def test_a_changed_batch_is_named():
    step = TrainStep(squared, adam(), Net(0))
    state, _ = step(step.init(), batch_of(0))
    message = r"traced again \(trace 2\): batch\['x'\] was float32\[6,3\], now float32\[4,3\]; batch\['y'\] was"
    with pytest.warns(RetraceWarning, match=message):
        state, _ = step(state, batch_of(0, size=4))
    state, _ = step(state, batch_of(1))
    assert step.traces == 2
    with pytest.warns(RetraceWarning, match=r"key was absent, now key<fry>\[\]"):
        step(state, batch_of(1), jax.random.key(0))


def _warns_here(call):
    """Call a function that must warn once, at its own line in this file, and return its result."""
    with pytest.warns(RetraceWarning) as found:
        result = call()
    assert [(x.filename, x.lineno) for x in found] == [(__file__, call.__code__.co_firstlineno)]
    return result


@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_the_warning_points_at_the_call(layout):
    step = TrainStep(squared, adam(), Net(0), layout=layout)
    state, _ = step(step.init(), batch_of(0))
    state, _ = _warns_here(lambda: step(state, batch_of(0, size=4)))
    _warns_here(lambda: step.compile(batch_of(0, size=3)))
    call = make_train_step(squared)
    model, optimizer, _ = call(Net(0), Optimizer.create(adam(), Net(0)), batch_of(0))
    _warns_here(lambda: call(model, optimizer, batch_of(0, size=4)))


def test_a_changed_state_is_refused():
    step = TrainStep(squared, adam(), Net(0))
    state, _ = step(step.init(), batch_of(0))
    state = jax.tree.map(lambda x: x.astype("float16") if x.shape == (2,) and x.dtype == "float32" else x, state)
    message = r"something outside of the step turned params.last.bias from float32\[2\] into float16\[2\]"
    with pytest.raises(ConfigError, match=message):
        step(state, batch_of(0))


def test_raising_comes_before_anything_is_donated():
    step = TrainStep(squared, adam(), Net(0), on_retrace="raise")
    state, _ = step(step.init(), batch_of(0))
    with pytest.raises(ConfigError, match=r"batch\['x'\] was .* keep shapes and dtypes the same"):
        step(state, batch_of(0, size=5))
    assert not any(x.is_deleted() for x in state.buffers)
    state, _ = step(state, batch_of(1))
    assert state.step == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_trace_that_failed_does_not_count(error):
    fail = [True]

    def loss_fn(model, batch, key):
        if fail:
            raise error(fail.pop())
        return squared(model, batch, key)

    step = TrainStep(loss_fn, adam(), Net(0), on_retrace="raise")
    state = step.init()
    with pytest.raises(error):
        step(state, batch_of(0, size=4))
    assert step.traces == 0
    state, _ = step(state, batch_of(0))
    assert (state.step, step.traces) == (1, 1)


def test_ignoring_says_nothing_and_counts():
    step = TrainStep(squared, adam(), Net(0), on_retrace="ignore")
    state, _ = step(step.init(), batch_of(0))
    with warnings.catch_warnings(action="error"):
        step(state, batch_of(0, size=5))
    assert step.traces == 2


def test_host_arrays_and_device_arrays_are_one_trace():
    step = TrainStep(squared, adam(), Net(0), on_retrace="raise")
    state, _ = step(step.init(), batch_of(0))
    step(state, jax.device_put(batch_of(1)))
    assert step.traces == 1


def test_a_difference_names_a_few_leaves():
    before = {f"b[{i}]": "f32[2]" for i in range(5)} | {"same": "i32[]"}
    now = {f"b[{i}]": "f32[3]" for i in range(4)} | {"same": "i32[]"}
    text = difference(before, now)
    assert text.startswith("b[0] was f32[2], now f32[3]; ")
    assert text.endswith("; and 2 more")
    assert "same" not in text
    assert "no shape, dtype or static value changed" in difference(now, now)
    assert np.all([f"b[{i}]" in text for i in range(3)])

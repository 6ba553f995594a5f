import jax
import numpy as np
import optax

from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, batch_of, run, squared


def test_calls_after_compiling_compile_and_trace_nothing():
    step = TrainStep(squared, optax.sgd(0.1), Net(0), on_retrace="raise")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
    report = step.compile(shapes)
    state, compiled = step.init(), []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step(state, batch_of(0))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert step.traces == 1
    assert report.compile_s > 0
    assert report.trace_s > 0


def test_the_report_is_xlas():
    step = TrainStep(lambda m, b, k: ((m @ b) ** 2).sum(), optax.sgd(0.1), np.ones((32, 64), "f"))
    report = step.compile(np.ones((64, 16), "f"))
    products = 2 * 2 * 32 * 64 * 16
    assert report.flops is not None
    assert products <= report.flops < 1.5 * products
    state = 4 * 32 * 64 + 4
    assert report.argument_bytes == state + 4 * 64 * 16
    assert report.aliased_bytes == state
    assert report.peak_bytes >= report.argument_bytes
    assert "GFLOP" in str(report)
    assert "MiB" in str(report)
    assert "ENTRY" in report.hlo


def test_an_abstract_state_is_one_without_arrays():
    step = TrainStep(squared, optax.adam(0.1), Net(0), layout="grouped")
    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), step.init())
    assert jax.tree.leaves(kinds) == jax.tree.leaves(step.program.abstract())
    run(step, [batch_of(0)])


def test_a_profile_is_written_and_the_step_goes_on(tmp_path):
    step = TrainStep(squared, optax.sgd(0.1), Net(0), on_retrace="raise")
    state, _ = run(step, [batch_of(0)])
    with step.profile(tmp_path):
        state, _ = run(step, [batch_of(1)] * 2, state=state)
    assert list(tmp_path.rglob("*.xplane.pb"))
    run(step, [batch_of(0)], state=state)
    assert step.traces == 1

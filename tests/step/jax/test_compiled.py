from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullstride.errors import ConfigError
from fullstride.step.jax import Optimizer, TrainStep, make_train_step
from tests.step.jax.nets import Net, batch_of, run, squared


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the compilations that happen within the context."""
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_calls_after_compiling_compile_and_trace_nothing():
    weak = eqx.tree_at(lambda m: m.name, Net(0), jnp.asarray(3))
    assert weak.name.weak_type
    for net in (Net(0), weak):
        step = TrainStep(squared, optax.sgd(0.1), net, on_retrace="raise")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
        report = step.compile(shapes)
        state = step.init()
        with listening() as compiled:
            step(state, batch_of(0))
        assert not compiled
        assert step.traces == 1
        assert report.compile_s > 0
        assert report.trace_s > 0


def _on_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]) if eqx.is_array_like(x) else x, tree)


def _on_mesh(tree: Any) -> Any:
    """Divided along the first axis over a mesh of one device: scalars cannot lie as it does."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data", None))
    return jax.device_put(tree, sharding)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


WAYS = {"batch": _on_device, "batch on a mesh": _on_mesh}


@pytest.mark.parametrize("what", [*WAYS, "model"])
@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_what_is_committed_to_a_device_has_nothing_compiled_twice(what, layout):
    def net() -> Net:
        return _on_device(Net(0)) if what == "model" else Net(0)

    batch = WAYS[what](batch_of(0)) if what in WAYS else batch_of(0)
    step = TrainStep(squared, optax.adam(0.1), net(), layout=layout, on_retrace="raise")
    old = step.init()
    state, _ = step(old, batch)
    called, optimizer = make_train_step(squared), Optimizer.create(optax.adam(0.1), net())
    model, optimizer, _ = called(net(), optimizer, batch)
    with listening() as compiled:
        state, _ = step(state, batch)
        called(model, optimizer, batch)
    assert not compiled
    assert step.finish()["loss"] > 0
    with pytest.raises(ConfigError, match="state: that of step 0 was donated"):
        step(old, batch)


@pytest.mark.parametrize("what", [*WAYS, "shapes", "key", "model"])
@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_calls_after_compiling_for_what_is_committed_compile_nothing(what, layout):
    batch = batch_of(0) if what in ("key", "model") else WAYS.get(what, _on_device)(batch_of(0))
    key = _on_device(jax.random.key(0)) if what == "key" else jax.random.key(0)
    net = _on_device(Net(0)) if what == "model" else Net(0)
    step = TrainStep(squared, optax.adam(0.1), net, layout=layout, on_retrace="raise")
    step.compile(_shapes(batch) if what == "shapes" else batch, key)
    state = step.init()
    with listening() as compiled:
        state, _ = step(state, batch, key)
        step(state, batch, key)
    assert not compiled
    assert step.traces == 1


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

"""`TrainStep` in JAX on a GPU: `python -m pytest tests/gpu/test_step_jax.py`; on two GPUs or more sharding, too."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.cases.bert.workload import workload
from benchmarks.cases.step_jax.options import TrainStepOptions
from benchmarks.cases.step_jax.train_step import run as bench
from benchmarks.harness.results import read_result
from fullstride.step.jax import TrainStep, cached_filter_jit, data_parallel, fsdp, make_train_step
from fullstride.step.jax.call_style import Optimizer
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, run, squared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX sees"),
    pytest.mark.filterwarnings("ignore"),
]
LAYOUTS = pytest.mark.parametrize("layout", ["flat", "grouped"])


@pytest.fixture(autouse=True)
def _exact():
    """Products in fp32, not TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@LAYOUTS
def test_a_step_agrees_with_the_plain_loop(seed, layout):
    batches = [batch_of(10 * seed + i) for i in range(4)]
    trained, opt_state, losses = plain_loop(Net(seed), adam(), batches)
    step = TrainStep(squared, adam(), Net(seed), layout=layout, on_retrace="raise")
    state, mine = run(step, batches)
    assert_trees(state.model, trained, 1e-4, 1e-5)
    assert_trees(state.opt_state, opt_state, 1e-4, 1e-5)
    np.testing.assert_allclose(mine, losses, rtol=1e-4)


def test_the_call_style_and_the_cached_jit_agree_with_the_plain_loop(seed):
    batches = [batch_of(seed + i) for i in range(4)]
    trained, _, losses = plain_loop(Net(seed), adam(), batches)
    model, train_step, mine = Net(seed), make_train_step(squared, on_retrace="raise"), []
    optimizer = Optimizer.create(adam(), model)
    for batch in batches:
        model, optimizer, loss = train_step(model, optimizer, batch)
        mine.append(float(loss))
    assert_trees(model, trained, 1e-4, 1e-5)
    np.testing.assert_allclose(mine, losses, rtol=1e-4)
    double = cached_filter_jit(lambda m: jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, m), donate="all")
    for _ in range(3):
        model = double(model)
    np.testing.assert_allclose(model.last.weight, 8 * np.asarray(trained.last.weight), rtol=1e-4)


def _heavy(model, batch, key):
    x = batch["x"]
    for _ in range(20):
        x = jnp.tanh(x @ model)
    return jnp.mean(x)


@LAYOUTS
def test_calls_come_back_while_the_device_works(layout):
    step = TrainStep(_heavy, optax.sgd(1e-3), jnp.eye(4096) / 64, layout=layout)
    batch = {"x": jnp.ones((4096, 4096))}
    state, _ = step(step.init(), batch)
    step.finish()
    step.report()
    for _ in range(10):
        state, _ = step(state, batch)
    step.finish()
    assert step.report().hidden > 0.5
    assert step.traces == 1


@LAYOUTS
def test_buffers_are_donated_and_memory_does_not_grow(layout):
    step = TrainStep(squared, adam(), Net(0, width=512, depth=4), layout=layout, ema=0.99)
    state, used = step.init(), []
    for i in range(6):
        before = state.buffers
        state, _ = step(state, batch_of(i))
        step.finish()
        assert all(x.is_deleted() for x in before)
        used.append(jax.devices()[0].memory_stats()["bytes_in_use"])
    assert used[-1] <= used[1]
    report = step.compile(batch_of(0))
    assert report.aliased_bytes >= sum(x.nbytes for x in state.buffers)


def test_errors_are_polled_with_their_message():
    def checked(model, batch, key):
        return eqx.error_if(squared(model, batch, key), batch["x"].max() > 100, "x is above 100")

    step = TrainStep(checked, optax.sgd(0.1), Net(0))
    state, _ = step(step.init(), batch_of(0))
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"x is above 100 \(step 2\)"):
        _later(step, state, batch_of(0) | {"x": np.full((6, 3), 101, "f")})
    step = TrainStep(squared, optax.sgd(0.1), Net(0))
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        _later(step, step.init(), batch_of(0) | {"y": np.full((6, 2), np.nan, "f")})


def _later(step, state, batch):
    state, _ = step(state, batch)
    time.sleep(0.5)
    step(state, batch_of(0))
    step.finish()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_numbers_train(precision):
    model, batch = Net(0, width=64), batch_of(0, 256)
    step = TrainStep(squared, optax.adam(1e-2), model, precision=precision, layout="grouped", grad_norm=True)
    state, losses = run(step, [batch] * 40)
    assert losses[-1] < 0.8 * losses[0]
    assert {x.dtype.name for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array))} == {"float32"}
    assert step.traces == 1


@pytest.mark.parametrize("mode", ["sdpa", "dropout"])
def test_layouts_of_a_bert_train_alike(mode):
    work, found = workload("tiny", mode, "bf16", batch=4, length=128), []
    for layout in ("flat", "grouped"):
        step = TrainStep(work.loss_fn, work.optimizer, work.model(), layout=layout)
        _, losses = run(step, [work.batch] * 5, [work.key] * 5)
        found.append(losses)
    np.testing.assert_allclose(found[0], found[1], rtol=2e-2)
    assert found[0][-1] < found[0][0]


def test_the_bench_runs(tmp_path):
    options = TrainStepOptions(
        ("host", "step"), model="tiny", precision="bf16", calls=20, seconds=400.0, only=("TrainStep",)
    )
    host, step = (read_result(p) for p in bench(options, _network, tmp_path))
    assert host["device"] == step["device"] == "cuda"
    assert host["environment"]["gpu"]["name"]
    rows = {row["name"]: row for row in step["rows"]}
    assert {"bare executable, sdpa", "TrainStep grouped, dropout"} <= rows.keys()
    assert rows["bare executable, dropout"]["extra"]["fusions"]["random"] > 0


def _network(options, mode):
    return workload(options.model, mode, options.precision, options.batch_size, options.length)


def test_checkpoints_are_exact(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from fullstride.step.jax.checkpoint import Checkpoints

    step = TrainStep(squared, adam(), Net(0), layout="grouped")
    state, _ = run(step, [batch_of(i) for i in range(3)])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"epoch": 2})
        again, extra = checkpoints.restore(step)
    assert extra == {"epoch": 2}
    for a, b in zip(again.buffers, state.buffers, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", [data_parallel, lambda: fsdp(smallest=16)], ids=["data", "fsdp"])
@LAYOUTS
def test_several_gpus_train_as_one_does(kind, layout):
    batches = [batch_of(i, 8) for i in range(3)]
    one, losses = run(TrainStep(squared, adam(), Net(0, width=8)), batches)
    many, same = run(TrainStep(squared, adam(), Net(0, width=8), sharding=kind(), layout=layout), batches)
    assert_trees(jax.device_get(many.model), jax.device_get(one.model), 1e-4, 1e-5)
    np.testing.assert_allclose(same, losses, rtol=1e-4)

"""Loops whose loader fills one array for every batch, beside the loop that waits for each step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.step.jax import (
    Optimizer,
    TrainStep,
    cached_filter_jit,
    data_parallel,
    make_train_step,
    make_train_step_with_partition,
)
from tests.step.jax.foreign.buffers import aligned, slow_zeros

STEPS, RATE = 4, 0.1
# What is called with each batch, and returns a state or a model.
Call = Callable[[dict[str, Any]], Any]


class Scale(eqx.Module):
    weight: jax.Array
    table: Any

    def __init__(self, table: Any):
        self.weight, self.table = jnp.asarray([0.5, -1.25]), table


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    given = (batch["x"] * model.table).reshape(-1, 2)
    return jnp.mean((given @ model.weight - 1) ** 2) + batch["wait"].sum()


def train_step(**options: Any) -> Callable[[Any], Call]:
    def made(model: Any) -> Call:
        step = TrainStep(loss_fn, optax.sgd(RATE), model, **options)
        state = [step.init()]

        def call(batch: Any) -> Any:
            state[0], _ = step(state[0], batch)
            return state[0]

        return call

    return made


def call_style(model: Any) -> Call:
    step, held = make_train_step(loss_fn), [model, Optimizer.create(optax.sgd(RATE), model)]

    def call(batch: Any) -> Any:
        held[0], held[1], _ = step(*held, batch)
        return held[0]

    return call


def partitioned(model: Any) -> Call:
    step = make_train_step_with_partition(loss_fn, optax.sgd(RATE), model)
    held = [step.params, step.opt_state]

    def call(batch: Any) -> Any:
        held[0], held[1], _ = step(held[0], held[1], batch)
        return step.combine(held[0])

    return call


def of_ones_own(jit: Any) -> Callable[[Any], Call]:
    def made(model: Any) -> Call:
        @jit
        def step(model: Any, batch: Any) -> Any:
            grads = eqx.filter_grad(lambda m, b: loss_fn(m, b, None))(model, batch)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -jnp.float32(RATE) * g, grads))

        held = [model]

        def call(batch: Any) -> Any:
            held[0] = step(held[0], batch)
            return held[0]

        return call

    return made


def ahead_of_time(model: Any) -> Call:
    compiled: list[Any] = []

    def jit(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if not compiled:
                compiled.append(cached_filter_jit(function).lower(*args).compile())
            return compiled[0](*args)

        return call

    return of_ones_own(jit)(model)


FORMS = {
    "flat": train_step(),
    "grouped": train_step(layout="grouped"),
    "accumulated": train_step(accumulate=2),
    "sharded": lambda model: train_step(sharding=data_parallel(jax.devices()[:1]))(model),
    "call_style": call_style,
    "partitioned": partitioned,
    "cached": of_ones_own(cached_filter_jit),
    "cached, donated": of_ones_own(cached_filter_jit(donate="all-except-first")),
    "ahead of time": ahead_of_time,
}
KINDS = {
    "read-only view": lambda buffer: np.broadcast_to(buffer, buffer.shape),
    "every other row": lambda buffer: buffer[::2],
    "part": lambda buffer: buffer[2:],
}


def trained(form: Callable[[Any], Call], seed: int, buffer: np.ndarray, kind: Any, wait: bool) -> Any:
    """The weights after a few steps on one buffer that is filled anew as soon as a call came back."""
    rng = np.random.default_rng(seed)
    out: Any = None
    call = form(Scale(jnp.ones((1, buffer.shape[-1]))))
    for number in range(STEPS):
        buffer[...] = rng.normal(size=buffer.shape)
        # The first step compiles; all the others are sent off while the second waits.
        late = jnp.zeros(2) if wait or number != 1 else slow_zeros()
        out = call({"x": kind(buffer), "wait": late})
        if wait:
            jax.block_until_ready(out)
    buffer[...] = np.nan
    return np.asarray(getattr(out, "model", out).weight)


def check(form: Callable[[Any], Call], kind: Any, seed: int) -> None:
    # The last lies askew: JAX itself copies it, perhaps later.
    for shape, offset in [((64, 6), 0), ((256, 512), 16)]:
        expected = trained(of_ones_own(eqx.filter_jit), seed, aligned(shape), kind, wait=True)
        found = trained(form, seed, aligned(shape, offset), kind, wait=False)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_buffer_that_is_filled_again_changes_no_step_that_was_sent_off(form):
    check(form, lambda buffer: buffer, 11)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_nor_does_what_is_seen_of_it_in_another_way(kind):
    check(FORMS["flat"], kind, 12)
    check(FORMS["cached"], kind, 13)


def refilled(arrays: Any) -> None:
    """A loader of checkpoints that uses its memory again."""
    for x in jax.tree.leaves(arrays):
        x[...] = np.nan if x.dtype.kind == "f" else 7


def on_host(tree: Any) -> Any:
    """The tree in memory of NumPy's that begins where JAX reads it in place."""

    def copy(x: Any) -> np.ndarray:
        if x.dtype != np.float32:
            return np.array(x)
        out = aligned(x.shape)
        out[...] = x
        return out

    return jax.tree.map(copy, tree)


def test_a_state_in_numpy_arrays_may_be_overwritten_once_it_was_given():
    model = Scale(jnp.ones((1, 6)))
    batch = {"x": np.random.default_rng(5).normal(size=(4, 6)).astype("f"), "wait": jnp.zeros(2)}
    step = TrainStep(loss_fn, optax.adam(RATE), model, donate=False)
    parted = make_train_step_with_partition(loss_fn, optax.adam(RATE), model, donate=False)
    expected = np.asarray(step(step.init(), batch)[0].model.weight)
    parted(parted.params, parted.opt_state, batch)
    batch["wait"] = slow_zeros()
    state, given = on_host(step.init()), on_host((parted.params, parted.opt_state))
    found, (params, *_) = step(state, batch)[0], parted(given[0], given[1], batch)
    refilled((state, given))
    np.testing.assert_allclose(found.model.weight, expected, rtol=1e-6)
    np.testing.assert_allclose(parted.combine(params).weight, expected, rtol=1e-6)


def test_a_model_in_numpy_arrays_may_be_overwritten_once_it_was_taken_apart():
    table = aligned((1, 512))
    table[...] = 0.5
    model = eqx.tree_at(lambda m: m.weight, Scale(table), aligned((2,)) + np.float32(0.25))
    step = TrainStep(loss_fn, optax.sgd(RATE), model)
    state = step.init()
    parted = make_train_step_with_partition(loss_fn, optax.sgd(RATE), model)
    refilled(model)
    batch = {"x": np.ones((4, 512), np.float32), "wait": jnp.zeros(2)}
    # 0.5 x (0.25 + 0.25) - 1 squared.
    _, _, loss = parted(parted.params, parted.opt_state, batch)
    step(state, batch)
    assert float(loss) == float(step.finish()["loss"]) == 0.5625

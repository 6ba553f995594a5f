"""Ways to call a training step: Equinox's, JAX's own, and ours; all run the same step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
from equinox._compile_utils import hashable_combine, hashable_partition

from benchmarks.cases.step_jax.workload import Workload
from fullstride.step.jax.cached_jit import cached_filter_jit
from fullstride.step.jax.call_style import Optimizer, make_train_step
from fullstride.step.jax.partition_style import make_train_step_with_partition
from fullstride.step.jax.train_step import TrainStep


@dataclass(frozen=True)
class Running:
    """Way that is ready to be called."""

    call: Callable[[], Any]  # takes a step and returns what to wait for
    params: Callable[[], list[Any]]  # the trained arrays as they are now
    executable: Any = None  # JAX's compiled object, of a way that has it
    compile_ms: float = 0.0  # what making that took; other ways compile in their first call


def trained(tree: Any) -> list[Any]:
    """Return the floating-point arrays of a model."""
    return jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))


def _threaded(step: Callable[..., Any], state: Any, params: Callable[..., list[Any]] | None = None) -> Running:
    """Call `step(*state)`, which returns the next state and the loss, each time with the state of the call before."""
    held = [state]

    def call() -> Any:
        *held[0], loss = step(*held[0])
        return loss

    read = params or (lambda model, *_: trained(model))
    return Running(call, lambda: read(*held[0]))


def _updated(jit: Callable[..., Any], workload: Workload) -> Running:
    """Call a compiled `workload.update_of`."""
    given = workload.batch, workload.key
    return _threaded(lambda *trees: jit(given, *trees), workload.fresh())


def filter_jit(workload: Workload, donate: Any = "none") -> Running:
    """`eqx.filter_jit`."""
    return _updated(eqx.filter_jit(workload.update_of, donate=donate), workload)


def patched(workload: Workload, donate: Any = "none") -> Running:
    """Return `filter_jit` with its outputs split by the faster of Equinox's two partitions, as its inputs are."""
    running = _updated(eqx.filter_jit(lambda *trees: workload.update_of(*trees), donate=donate), workload)
    originals = eqx._jit.partition, eqx._jit.combine

    def call() -> Any:
        eqx._jit.partition, eqx._jit.combine = hashable_partition, hashable_combine
        try:
            return running.call()
        finally:
            eqx._jit.partition, eqx._jit.combine = originals

    return Running(call, running.params)


def optimizer_style(workload: Workload) -> Running:
    """`eqx.filter_jit` of a step with an `Optimizer`, whose transformation and filter are static."""
    model, _ = workload.fresh()

    @eqx.filter_jit
    def step(model: Any, optimizer: Any, batch: Any, key: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(workload.loss_fn)(model, batch, key)
        return *optimizer(grads, model), loss

    state = model, Optimizer.create(workload.optimizer, model)
    return _threaded(lambda model, optimizer: step(model, optimizer, workload.batch, workload.key), state)


def cached(workload: Workload, donate: str = "none") -> Running:
    """`cached_filter_jit`."""
    return _updated(cached_filter_jit(workload.update_of, donate=donate), workload)


def hoisted(workload: Workload) -> Running:
    """Take the partition out of the step and pass trees of modules through `jax.jit`, donated."""
    model, opt_state = workload.fresh()
    params, static = eqx.partition(model, eqx.is_array)

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        model, opt_state, loss = workload.update(eqx.combine(params, static), opt_state, batch, key)
        return eqx.filter(model, eqx.is_array), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    return _threaded(lambda *trees: jitted(*trees, workload.batch, workload.key), (params, opt_state))


def flat(workload: Workload, compiled: bool = False, donate: bool = True) -> Running:
    """Pass a flat list of leaves through `jax.jit`, or through the bare executable that it compiles."""
    trees, static = eqx.partition(workload.fresh(), eqx.is_array)
    leaves, shape = jax.tree.flatten(trees)

    def step(leaves: Any, batch: Any, key: Any) -> Any:
        model, opt_state = eqx.combine(jax.tree.unflatten(shape, leaves), static)
        model, opt_state, loss = workload.update(model, opt_state, batch, key)
        return jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array)), loss

    given = workload.batch, workload.key
    run: Any = jax.jit(step, donate_argnums=0 if donate else ())
    start = time.perf_counter()
    if compiled:
        run = run.lower(leaves, *given).compile()
    took = (time.perf_counter() - start) * 1e3 if compiled else 0.0
    running = _threaded(
        lambda leaves: run(leaves, *given), (leaves,), lambda leaves: trained(jax.tree.unflatten(shape, leaves)[0])
    )
    return replace(running, executable=run if compiled else None, compile_ms=took)


def train_step(workload: Workload, **settings: Any) -> Running:
    """`TrainStep`."""
    step = TrainStep(workload.loss_fn, workload.optimizer, workload.model(), **settings)

    def one(state: Any) -> tuple[Any, Any]:
        state, _ = step(state, workload.batch, workload.key)
        return state, state.buffers[0]

    return _threaded(one, (step.init(),), lambda state: trained(state.model))


def call_style(workload: Workload) -> Running:
    """`make_train_step`: model, optimizer, aux = train_step(model, optimizer, batch, key)."""
    step, (model, _) = make_train_step(workload.loss_fn), workload.fresh()
    state = model, Optimizer.create(workload.optimizer, model)
    return _threaded(lambda *trees: step(*trees, workload.batch, workload.key), state)


def partitioned(workload: Workload) -> Running:
    """`make_train_step_with_partition`."""
    step = make_train_step_with_partition(workload.loss_fn, workload.optimizer, workload.model())

    def one(params: Any, opt_state: Any) -> Any:
        return step(params, opt_state, workload.batch, workload.key)

    return _threaded(one, (step.params, step.opt_state), lambda params, _: list(params))


DONATED = "all-except-first"
# Baseline of all others.
FLAT, BARE = "flat list", "bare executable"
WAYS: dict[str, Callable[[Workload], Running]] = {
    "filter_jit": filter_jit,
    "filter_jit donated": partial(filter_jit, donate=DONATED),
    "filter_jit patched": patched,
    "filter_jit patched, donated": partial(patched, donate=DONATED),
    "filter_jit + Optimizer": optimizer_style,
    "cached_filter_jit": cached,
    "cached_filter_jit donated": partial(cached, donate=DONATED),
    "hoisted partition": hoisted,
    "make_train_step": call_style,
    "..._with_partition": partitioned,
    FLAT: flat,
    "flat list not donated": partial(flat, donate=False),
    BARE: partial(flat, compiled=True),
    "TrainStep": train_step,
    "TrainStep grouped": partial(train_step, layout="grouped"),
}

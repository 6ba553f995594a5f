"""Host time of a training step by the way it is called, on a tree of BERT-base's shape: 616 arrays with AdamW.

    python benchmarks/step_overhead.py --out step-overhead.json [--calls 200] [--layers 12] [--only flat,filter_jit]

Every way does the same to the same tree: a trivial loss and an update that multiplies each array once, so that the
time is that of dispatch. One call of each in turns, in one process: what drifts with the machine drifts for all. Three
times for a call, the device idle before it: until it came back (`host`), the calling thread's processor time of that
(`cpu`, which others on the machine disturb least), and until the result was there (`ready`).
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from bert_tree import TRIVIAL, Bert, inputs, one_bias
from equinox._compile_utils import hashable_combine, hashable_partition

from fullstride.bench.environment import environment
from fullstride.bench.timing import Timing
from fullstride.step.jax import (
    Optimizer,
    TrainStep,
    cached_filter_jit,
    make_train_step,
    make_train_step_with_partition,
)

OPTIMIZER = TRIVIAL
# A call that returns what to wait for.
Call = Callable[[], Any]


def update(model: Any, opt_state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """The body that the ways share."""
    loss, grads = eqx.filter_value_and_grad(one_bias)(model, batch, key)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def fresh(layers: int) -> tuple[Any, Any]:
    """A model and its optimizer state whose buffers are nobody else's."""
    model = Bert(layers)
    trees = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, trees)


def update_of(given: tuple[Any, Any], model: Any, opt_state: Any) -> tuple[Any, Any, Any]:
    """The body with what is not donated first, as `donate="all-except-first"` wants it."""
    return update(model, opt_state, *given)


def threaded(step: Callable[..., Any], layers: int) -> Call:
    """Calls of `step((batch, key), model, opt_state)`, each with what the one before returned."""
    state, given = list(fresh(layers)), inputs()

    def call() -> Any:
        state[0], state[1], loss = step(given, *state)
        return loss

    return call


def filter_jit(layers: int) -> Call:
    """`eqx.filter_jit`, as it comes."""
    return threaded(eqx.filter_jit(update_of), layers)


def filter_jit_donated(layers: int) -> Call:
    """The same with its buffers donated."""
    return threaded(eqx.filter_jit(update_of, donate="all-except-first"), layers)


def filter_jit_patched(layers: int) -> Call:
    """The same, its outputs taken apart by the faster of Equinox's two partitions, which its inputs go through."""
    call = threaded(eqx.filter_jit(lambda *trees: update_of(*trees), donate="all-except-first"), layers)
    originals = eqx._jit.partition, eqx._jit.combine

    def patched() -> Any:
        eqx._jit.partition, eqx._jit.combine = hashable_partition, hashable_combine
        try:
            return call()
        finally:
            eqx._jit.partition, eqx._jit.combine = originals

    return patched


def cached(layers: int) -> Call:
    """`cached_filter_jit`."""
    return threaded(cached_filter_jit(update_of), layers)


def cached_donated(layers: int) -> Call:
    """The same with its buffers donated."""
    return threaded(cached_filter_jit(update_of, donate="all-except-first"), layers)


def hoisted(layers: int) -> Call:
    """The partition taken out of the step, trees of modules through `jax.jit`, donated."""
    model, opt_state = fresh(layers)
    params, static = eqx.partition(model, eqx.is_array)

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        model, opt_state, loss = update(eqx.combine(params, static), opt_state, batch, key)
        return eqx.filter(model, eqx.is_array), opt_state, loss

    jitted, state, given = jax.jit(step, donate_argnums=(0, 1)), [params, opt_state], inputs()

    def call() -> Any:
        state[0], state[1], loss = jitted(*state, *given)
        return loss

    return call


def flat(layers: int) -> Call:
    """A flat list of leaves through `jax.jit`, donated: the floor for one buffer a leaf."""
    trees, static = eqx.partition(fresh(layers), eqx.is_array)
    leaves, shape = jax.tree.flatten(trees)

    def step(leaves: Any, batch: Any, key: Any) -> Any:
        trees = eqx.combine(jax.tree.unflatten(shape, leaves), static)
        *trees, loss = update(*trees, batch, key)
        return jax.tree.leaves(eqx.filter(trees, eqx.is_array)), loss

    jitted, state, given = jax.jit(step, donate_argnums=0), [leaves], inputs()

    def call() -> Any:
        state[0], loss = jitted(state[0], *given)
        return loss

    return call


def train_step(layers: int, **settings: Any) -> Call:
    """`TrainStep`."""
    step = TrainStep(one_bias, OPTIMIZER, Bert(layers), **settings)
    state, given = [step.init()], inputs()

    def call() -> Any:
        state[0], _ = step(state[0], *given)
        return state[0].buffers[0]

    return call


def call_style(layers: int) -> Call:
    """`make_train_step`: model, optimizer, aux = train_step(model, optimizer, batch, key)."""
    step, model, given = make_train_step(one_bias), fresh(layers)[0], inputs()
    state = [model, Optimizer.create(OPTIMIZER, model)]

    def call() -> Any:
        state[0], state[1], loss = step(state[0], state[1], *given)
        return loss

    return call


def partitioned(layers: int) -> Call:
    """`make_train_step_with_partition`."""
    step, given = make_train_step_with_partition(one_bias, OPTIMIZER, Bert(layers)), inputs()
    state = [step.params, step.opt_state]

    def call() -> Any:
        state[0], state[1], loss = step(*state, *given)
        return loss

    return call


WAYS: dict[str, Callable[[int], Call]] = {
    "filter_jit": filter_jit,
    "filter_jit donated": filter_jit_donated,
    "filter_jit patched": filter_jit_patched,
    "cached_filter_jit": cached,
    "cached_filter_jit donated": cached_donated,
    "hoisted partition": hoisted,
    "flat list": flat,
    "make_train_step": call_style,
    "..._with_partition": partitioned,
    "TrainStep": train_step,
    "TrainStep grouped": partial(train_step, layout="grouped"),
}


def measure(calls: dict[str, Call], repeats: int) -> dict[str, Any]:
    """Times of every way in milliseconds, one call of each in turns, the garbage of one never collected in another."""
    samples: dict[str, Any] = {name: {"host": [], "cpu": [], "ready": []} for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            gc.collect(0)
            start, cpu = time.perf_counter(), time.thread_time()
            out = call()
            host, cpu = time.perf_counter() - start, time.thread_time() - cpu
            jax.block_until_ready(out)
            for kind, seconds in {"host": host, "cpu": cpu, "ready": time.perf_counter() - start}.items():
                samples[name][kind].append(seconds * 1e3)
    return samples


def summary(samples: dict[str, Any], first: dict[str, float], base: str) -> list[dict[str, Any]]:
    """A row for each way; `over` is the median of its calls' ratios to those of `base` in the same round."""
    rows = []
    for name, times in samples.items():
        ratios = [a / b for a, b in zip(times["cpu"], samples[base]["cpu"], strict=True)]
        row: dict[str, Any] = {"name": name, "first_ms": first[name], "over": statistics.median(ratios)}
        rows.append(row | {kind: Timing(first[name], tuple(t), None).to_dict() for kind, t in times.items()})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians in milliseconds, the spread of the processor time, and the first call in seconds."""
    lines = [f"{'':28}{'host':>8}{'ready':>8}{'cpu':>8}{'p10':>8}{'p90':>8}{'x flat':>8}{'first':>7}"]
    for row in rows:
        cpu = row["cpu"]
        times = (row["host"]["median_ms"], row["ready"]["median_ms"], cpu["median_ms"], cpu["p10_ms"], cpu["p90_ms"])
        text = "".join(f"{t:8.3f}" for t in times)
        lines.append(f"{row['name']:28}{text}{row['over']:8.2f}{row['first_ms'] / 1e3:7.1f}")
    return "\n".join(lines)


def main() -> None:
    """Build, warm up, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", help="names of ways, divided by commas; flat list is always there")
    options = parser.parse_args()
    chosen = [n for n in WAYS if not options.only or n in options.only.split(",") or n == "flat list"]
    calls, first = {}, {}
    for name in chosen:
        calls[name] = WAYS[name](options.layers)
        start = time.perf_counter()
        jax.block_until_ready(calls[name]())
        first[name] = (time.perf_counter() - start) * 1e3
    measure(calls, 10)
    rows = summary(measure(calls, options.calls), first, "flat list")
    print(table(rows))  # noqa: T201, a script's output
    if options.out:
        found = {"layers": options.layers, "device": jax.devices()[0].device_kind, "rows": rows}
        options.out.write_text(json.dumps(found | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

import re

import jax
import jax.numpy as jnp

from benchmarks.cases.step_jax.xla_trace import kernels_of
from benchmarks.harness.kernel_groups import summary

STEPS = 3


def _traced(folder, program, x):
    jax.block_until_ready(program(x))
    with jax.profiler.trace(str(folder)):
        for _ in range(STEPS):
            jax.block_until_ready(program(x))


def test_the_kernels_of_the_newest_trace_are_the_programs(tmp_path, seed):
    x = jax.random.normal(jax.random.key(seed), (300, 300))
    first = jax.jit(lambda x: jnp.cumsum(x, 0)).lower(x).compile()
    second = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile()
    for name, program in (("a", first), ("b", second)):
        _traced(tmp_path / name, program, x)
    found = kernels_of(tmp_path, STEPS)
    named = set(re.findall(r"%?([\w.\-]+) = ", second.as_text() or ""))
    assert found
    assert {name for name, *_ in found} <= named
    assert all(ms > 0 for _, ms, _ in found)
    assert max(found, key=lambda kernel: kernel[1])[2] >= 1
    assert summary(found)["ms"] > 0

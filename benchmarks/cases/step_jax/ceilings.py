"""Rates that this machine reaches with JAX: one matrix product, and one copy or read."""

from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from fullstride.measure.roofline import COPY_BYTES, GEMM_SIZE, Ceilings
from fullstride.measure.timing import HostClock, TimingPlan, measure

# Names of JAX's platforms in the other benchmarks.
PLATFORMS = {"gpu": "cuda", "cpu": "cpu"}
COLUMNS = 1024
# By what moves bytes: a sum with a number, since a mere copy would be an alias; and what a decode step of one row does,
# a matrix read once, for which XLA's copies on a CPU are slower.
MOVES = {"copy": lambda w, x: w + x[0], "read": lambda w, x: w @ x}
PASSES = {"copy": 2, "read": 1}
# Calls that are waited for together where the device works beside the host, whose launching and waiting, a tenth of a
# reading and more on a busy host, are no part of a rate. Eight copies' results fit into any such device beside others.
IN_A_ROW = {"cuda": 8}


def platform() -> str:
    """Return `cuda` or `cpu`, or JAX's own name of another platform."""
    return PLATFORMS.get(jax.default_backend(), jax.default_backend())


def jax_ceilings(dtype: str = "float32", moved: str = "copy") -> Ceilings:
    """Measure both rates on JAX's default device, as `measure_ceilings` does by PyTorch.

    An fp32 product runs at JAX's own precision, like the work that it is compared with: TF32 on an NVIDIA GPU.

    `moved` is `copy`, or `read`, a large matrix times a vector, for work that writes next to nothing.
    """
    size, count = GEMM_SIZE.get(platform(), 2048), COPY_BYTES.get(platform(), 256 << 20)
    one, two = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    matrix, vector = jnp.ones((count // 4 // COLUMNS, COLUMNS), jnp.float32), jnp.ones(COLUMNS)
    gemm, move = _milliseconds(jax.jit(jnp.matmul), one, two), _milliseconds(jax.jit(MOVES[moved]), matrix, vector)
    rates = 2 * size**3 / median(gemm) * 1e3, PASSES[moved] * count / median(move) * 1e3
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    quick = dtype == "float32" and platform() == "cuda" and asked in (None, "default", "tensorfloat32")
    return Ceilings(*rates, f"{size}^3 {'tf32' if quick else dtype}", count, gemm, move, moved)


def _milliseconds(function: Any, *args: Any) -> list[float]:
    """Return the milliseconds of one call; the calls of a row are waited for together."""
    row = IN_A_ROW.get(platform(), 1)

    def run() -> None:
        for _ in range(row - 1):
            function(*args)
        function(*args).block_until_ready()

    found = measure(run, HostClock(), TimingPlan(warmup=3, repeats=10, seconds=0.3))
    return [ms / row for ms in found.samples_ms]

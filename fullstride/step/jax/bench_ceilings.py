"""The rates that this machine reaches by JAX: one matrix product and one copy."""

from typing import Any

import jax
import jax.numpy as jnp

from fullstride.bench.floor import COPY_BYTES, GEMM_SIZE, Ceilings
from fullstride.bench.timing import HostClock, Plan, measure

# As the other benches name JAX's platforms.
PLATFORMS = {"gpu": "cuda", "cpu": "cpu"}


def platform() -> str:
    """`cuda` or `cpu`, or JAX's own name for another one."""
    return PLATFORMS.get(jax.default_backend(), jax.default_backend())


def jax_ceilings(dtype: str = "float32") -> Ceilings:
    """Measure both rates on JAX's default device; see `measure_ceilings`, which does by PyTorch."""
    size, copied = GEMM_SIZE.get(platform(), 2048), COPY_BYTES.get(platform(), 256 << 20)
    one, two = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    source = jnp.zeros(copied // 4, jnp.float32)
    plan = Plan(warmup=3, repeats=10, seconds=0.3)
    gemm = measure(_waited(jax.jit(jnp.matmul), one, two), HostClock(), plan)
    # A sum with a number, since a mere copy would be an alias.
    copy = measure(_waited(jax.jit(jnp.add), source, jnp.float32(1)), HostClock(), plan)
    rates = 2 * size**3 / gemm.median_ms * 1e3, 2 * copied / copy.median_ms * 1e3
    return Ceilings(*rates, f"{size}^3 {dtype}", copied, list(gemm.samples_ms), list(copy.samples_ms))


def _waited(function: Any, *args: Any) -> Any:
    return lambda: function(*args).block_until_ready()

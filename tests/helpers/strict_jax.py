"""JAX for tests: programs compiled once per run, with little optimisation, and nothing promoted silently."""

import os

import jax
import pytest

from tests.helpers.compiled_soon import flag_xla

flag_xla()
jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ["FULLSTRIDE_CACHE"], "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def strict():
    """Raise for promotions that JAX would do silently."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield

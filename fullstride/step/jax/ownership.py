"""Buffers that a step may donate: nobody else's, each given once."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def owned(x: Any) -> Any:
    """A copy that is nobody else's, without a weak type."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.lax.convert_element_type(jnp.array(x, copy=True), x.dtype)


def apart(tree: Any) -> Any:
    """The tree with a copy of each array that it holds twice, which could not be donated, and without weak types."""
    seen: set[int] = set()

    def once(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        known = id(x) in seen
        seen.add(id(x))
        return owned(x) if known or getattr(x, "weak_type", False) else x

    return jax.tree.map(once, tree)


def gone(arrays: Iterable[Any]) -> bool:
    """Whether any of them was donated."""
    return any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in arrays)

"""Ownership of buffers: a step may donate only those that nobody else holds, each once."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def copied(x: Any) -> Any:
    """Return a copy that nobody else holds, without a weak type."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.lax.convert_element_type(jnp.array(x, copy=True), x.dtype)


def private(tree: Any) -> Any:
    """The tree with a copy of each NumPy array, whose owner may fill it anew before a call that came back has read it.

    JAX reads such an array where it lies, or copies it later: `jnp.array(x, copy=True)` and
    `jax.device_put(x, may_alias=False)` too, by the tests on jax 0.10.2. One that cannot be written to may be a view of
    one that can.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not are_numpys(leaves):
        return tree
    return jax.tree.unflatten(treedef, [x.copy() if isinstance(x, np.ndarray) else x for x in leaves])


def are_numpys(leaves: Iterable[Any]) -> bool:
    """Return whether any of them is a NumPy array."""
    return any(issubclass(kind, np.ndarray) for kind in set(map(type, leaves)))


def apart(tree: Any) -> Any:
    """The tree with a copy of each array that it holds twice, which could not be donated, and without weak types."""
    seen: set[int] = set()

    def once(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        known = id(x) in seen
        seen.add(id(x))
        return copied(x) if known or getattr(x, "weak_type", False) else x

    return jax.tree.map(once, tree)


def strongly_typed(x: Any) -> jax.Array:
    """Return a JAX array without a weak type; `x` itself if it is one."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def device_of(tree: Any) -> Any:
    """Return the one device that the tree's arrays or shapes are committed to; None for several or none."""
    found = {device for x in jax.tree.leaves(tree) if is_committed(x) for device in x.sharding.device_set}
    return found.pop() if len(found) == 1 else None


def is_committed(x: Any) -> bool:
    """Return whether `x` is an array that must stay on its device, or a shape with a sharding, which stands for one."""
    return getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None)


def settled(tree: Any, *beside: Any) -> Any:
    """Commit the tree's arrays to a device, if any array of it or of its companions is committed.

    What such a call returns is committed, and arguments that are not would be another program, compiled for one call.
    """
    # Not with the sharding that was found: its axes or its kind of memory need not fit what is put there.
    device = device_of((tree, beside))
    return tree if device is None else jax.device_put(tree, device)


def is_deleted(arrays: Iterable[Any]) -> bool:
    """Return whether any of the arrays was donated."""
    return any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in arrays)

"""A small model with trained, fixed and static leaves, and the plain Equinox loop that steps are compared with."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def _linear(rng: Any, size_in: int, size_out: int) -> eqx.nn.Linear:
    with jax.ensure_compile_time_eval():
        empty = eqx.filter_eval_shape(eqx.nn.Linear, size_in, size_out, key=jax.random.key(0))
    weights = [jnp.asarray(rng.normal(size=s.shape) / size_in**0.5, jnp.float32) for s in jax.tree.leaves(empty)]
    return eqx.tree_at(lambda m: (m.weight, m.bias), empty, tuple(weights))


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(eqx.Module):
    first: eqx.nn.Linear
    blocks: list
    last: eqx.nn.Linear
    ids: jax.Array
    scale: float = eqx.field(static=True)
    name: str

    def __init__(self, seed: int, width: int = 5, depth: int = 2):
        rng = np.random.default_rng(seed)
        self.first, self.last = _linear(rng, 3, width), _linear(rng, width, 2)
        self.blocks = [Block(_linear(rng, width, width)) for _ in range(depth)]
        self.ids, self.scale, self.name = jnp.arange(width), 0.5, "net"

    def __call__(self, x):
        x = self.first(x)[self.ids]
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def batch_of(seed: int, size: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 3)).astype("f"), "y": rng.normal(size=(size, 2)).astype("f")}


def squared(model: Any, batch: Any, key: Any) -> Any:
    """The loss, with noise on the targets where there is a key."""
    noise = 0.0 if key is None else jax.random.normal(key, batch["y"].shape, batch["y"].dtype)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"] - noise) ** 2)


def plain_loop(model: Any, optimizer: Any, batches: Any, keys: Any = None, loss_fn: Any = squared) -> Any:
    """The loop that Equinox's documentation teaches.

    Returns:
        Model, optimizer state, losses.

    """

    @eqx.filter_jit
    def step(model, opt_state, batch, key):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for batch, key in zip(batches, keys or [None] * len(batches), strict=True):
        model, opt_state, loss = step(model, opt_state, batch, key)
        losses.append(float(loss))
    return model, opt_state, losses


def adam() -> Any:
    """Clipping, a schedule and weight decay."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(3e-2, 1e-3, 10)))


def run(step: Any, batches: Any, keys: Any = None, state: Any = None) -> tuple[Any, list[float]]:
    """A loop with a step.

    Returns:
        The last state and every loss.

    """
    state = step.init() if state is None else state
    losses = []
    for batch, key in zip(batches, keys or [None] * len(batches), strict=True):
        state, late = step(state, batch, key)
        losses += [float(late["loss"])] if late else []
    return state, [*losses, float(step.finish()["loss"])]


def assert_trees(tree: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Same structure, dtypes and, closely, values."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(b):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        else:
            assert a == b

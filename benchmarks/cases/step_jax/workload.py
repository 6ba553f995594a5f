"""Workload for comparing ways to call a step: a tree of BERT's shape in Equinox modules with small widths.

The cost of dispatch depends on the number of leaves and nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fullstride.measure.roofline import Ceilings, RooflineBound, roofline_bound

Trees = tuple[Any, Any]
WIDTH, INNER, WORDS, PLACES = 24, 48, 64, 16


@dataclass(frozen=True)
class Workload:
    """Model with its loss, optimizer and batch."""

    name: str  # for the table
    model: Callable[[], Any]  # makes the model; the same one each time
    loss_fn: Callable[[Any, Any, Any], Any]  # scalar loss of (model, batch, key)
    optimizer: optax.GradientTransformation  # optax's
    batch: Any  # on the device
    key: Any  # what the loss gets
    flops: float = 0.0  # operations of a step's products, 2 a multiply-add, backward included; 0 where there is none

    def fresh(self) -> Trees:
        """Return a model and its optimizer state with buffers of their own."""
        model = self.model()
        trees = model, self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, trees)

    def update(self, model: Any, opt_state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        """Run the step that all ways share."""
        loss, grads = eqx.filter_value_and_grad(self.loss_fn)(model, batch, key)
        updates, opt_state = self.optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def update_of(self, given: Any, model: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """Update with the non-donated arguments first, as `donate="all-except-first"` requires."""
        return self.update(model, opt_state, *given)

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arrays of model and state."""
        trees = eqx.filter_eval_shape(self.fresh)
        return [x for x in jax.tree.leaves(trees) if isinstance(x, jax.ShapeDtypeStruct)]

    def floor(self, ceilings: Ceilings) -> RooflineBound:
        """Return the roofline bound of the products alone, and of reading and writing every array once."""
        moved = 2 * sum(x.size * x.dtype.itemsize for x in self.arrays())
        return roofline_bound(self.flops, moved, ceilings)


def _linear(size_in: int, size_out: int) -> eqx.nn.Linear:
    return eqx.nn.Linear(size_in, size_out, key=jax.random.key(0))


class StaticDropout(eqx.Module):
    """Dropout whose settings are static fields; Equinox's own are leaves."""

    p: float = eqx.field(static=True)
    inference: bool = eqx.field(static=True, default=False)


class Attention(eqx.Module):
    """Four projections, a norm, dropout."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.Module

    def __init__(self, dropout: type):
        self.query = _linear(WIDTH, WIDTH)
        self.key = _linear(WIDTH, WIDTH)
        self.value = _linear(WIDTH, WIDTH)
        self.out = _linear(WIDTH, WIDTH)
        self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), dropout(0.1)


class Feedforward(eqx.Module):
    """Two projections, a norm, dropout."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.Module

    def __init__(self, dropout: type):
        self.up, self.down = _linear(WIDTH, INNER), _linear(INNER, WIDTH)
        self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), dropout(0.1)


class Layer(eqx.Module):
    """Transformer layer with 16 arrays."""

    attention: Attention
    feedforward: Feedforward

    def __init__(self, dropout: type):
        self.attention, self.feedforward = Attention(dropout), Feedforward(dropout)


class Bert(eqx.Module):
    """BERT with 13 arrays and 16 for each layer: 205 for 12 layers, 616 with the state of AdamW."""

    words: eqx.nn.Embedding
    places: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    dropout: eqx.Module
    layers: list
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear
    head_norm: eqx.nn.LayerNorm
    head_out: eqx.nn.Linear

    def __init__(self, layers: int = 12, dropout: type = eqx.nn.Dropout):
        key = jax.random.key(0)
        self.words = eqx.nn.Embedding(WORDS, WIDTH, key=key)
        self.places = eqx.nn.Embedding(PLACES, WIDTH, key=key)
        self.types = eqx.nn.Embedding(2, WIDTH, key=key)
        self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), dropout(0.1)
        self.layers = [Layer(dropout) for _ in range(layers)]
        self.pooler, self.head = _linear(WIDTH, WIDTH), _linear(WIDTH, WIDTH)
        self.head_norm, self.head_out = eqx.nn.LayerNorm(WIDTH), _linear(WIDTH, WORDS)


def one_bias(model: Any, batch: Any, key: Any) -> Any:
    """Return a loss that computes next to nothing."""
    return batch["scale"] * model.head_out.bias.sum() + 0 * jax.random.key_data(key)[0].astype("float32")


def _shrink(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.999, tree)


def _start(params: Any) -> Any:
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))


def _update(updates: Any, state: Any, params: Any = None) -> Any:
    changed = jax.tree.map(lambda g, p: -0.001 * (g + p), updates, params)
    return changed, optax.ScaleByAdamState(state.count + 1, _shrink(state.mu), _shrink(state.nu))


# AdamW's state, every array of it rewritten by one multiplication: what is left of a step is its dispatch.
TRIVIAL = optax.GradientTransformation(_start, _update)


class Tower(eqx.Module):
    """Linear layers without end, for a law over the number of arrays."""

    layers: list
    head_out: eqx.nn.Linear

    def __init__(self, layers: int):
        self.layers, self.head_out = [_linear(WIDTH, WIDTH) for _ in range(layers)], _linear(WIDTH, WORDS)


# Layers of BERT's sizes (arXiv:1810.04805, arXiv:1908.08962).
LAYERS = {"tiny": 2, "mini": 4, "small": 4, "medium": 8, "base": 12, "large": 24}


def tower(layers: int) -> Workload:
    """Return the same on a tower, of 6 arrays a layer with AdamW's state, and 7 beside them."""
    return replace(tree("tiny"), name=f"{6 * layers + 7} arrays", model=lambda: Tower(layers))


def busy(workload: Workload, products: int) -> Workload:
    """Return a step that also computes as many products of 512 x 512 matrices, one after another."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        chain = jax.lax.fori_loop(0, products, lambda _, x: x @ batch["work"], batch["work"])
        return workload.loss_fn(model, batch, key) + 0 * chain[0, 0]

    work = jnp.eye(512, dtype="float32")
    flops = 2.0 * 512**3 * products
    return replace(workload, loss_fn=loss_fn, batch={**workload.batch, "work": work}, flops=flops)


def tree(size: str, dropout: type = eqx.nn.Dropout) -> Workload:
    """Return a step on a tree of this size that rewrites every array by one multiplication."""
    batch = {"ids": jnp.ones((1, 4), jnp.int32), "scale": jnp.asarray(np.float32(0.5))}
    layers = LAYERS[size]
    return Workload(size, lambda: Bert(layers, dropout), one_bias, TRIVIAL, batch, jax.random.key(1))

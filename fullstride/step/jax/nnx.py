"""Models of Flax NNX in a step: split once, held as flat leaves, merged inside of the trace.

Flax is not imported here: who has one of its modules has imported it.
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from fullstride.errors import ConfigError
from fullstride.step.jax.loss import parts_of_loss
from fullstride.step.jax.trees.ownership import copied


class NnxModels:
    """Module, or a dict of them, as `flax.nnx.split` sees them.

    What a filter takes of them is trained. All other state, such as statistics and the counts of random streams, is
    what the loss reads and rewrites.

    Attributes:
        wrt: the filter.
        graphdefs: the static part of each module.

    """

    def __init__(self, nnx: Any, model: Any, optimizer: Any, wrt: Any):
        self._nnx = nnx
        self._optimizers = [o for o in _members(optimizer) if isinstance(o, nnx.Optimizer)]
        filters = [o.wrt for o in self._optimizers] if wrt is eqx.is_inexact_array else [wrt]
        if any(wrt != filters[0] for wrt in filters):
            raise ConfigError(f"optimizer: they have the filters {filters}; expected one wrt for all models")
        self.wrt = filters[0] if filters else nnx.Param
        self.graphdefs = self._apart(model)[0]

    def taken(self) -> int:
        """Return the steps that an `nnx.Optimizer` has counted so far."""
        return int(self._optimizers[0].step[...]) if self._optimizers else 0

    def split(self, model: Any) -> tuple[Any, Any]:
        """Return what is trained, and all other state.

        Raises:
            ConfigError: for a model of another structure than the step's.

        """
        graphdefs, params, rest = self._apart(model)
        if graphdefs != self.graphdefs:
            raise ConfigError(
                "model: its graphdef is not the one that the step was built with; keep its structure, mode and static "
                "attributes, and take what a loss adds, such as nnx.Intermediate, out again with nnx.pop"
            )
        return params, rest

    def merge(self, params: Any, rest: Any) -> Any:
        """Return new modules of these arrays."""
        merge = lambda g, p, r: self._nnx.merge(g.value, p, r)  # noqa: E731
        return jax.tree.map(merge, self.graphdefs, params, rest, is_leaf=lambda x: isinstance(x, _GraphDef))

    def loss(self, loss_fn: Any, has_aux: bool | None) -> Any:
        """Return a loss of (params, rest, batch, key), from one of (model, batch, key) that may change the model."""
        if isinstance(loss_fn, dict):
            return {name: self.loss(loss, has_aux) for name, loss in loss_fn.items()}

        def stateful(params: Any, rest: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
            model = self.merge(params, rest)
            loss, aux = parts_of_loss(loss_fn(model, batch, key), has_aux)
            found, rest = self.split(model)
            for (path, new), old in zip(
                jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(params), strict=True
            ):
                if new is not old:
                    raise ConfigError(
                        f"loss_fn changed model{jax.tree_util.keystr(path)}, which the optimizer trains; leave it, or "
                        "exclude it from wrt"
                    )
            return loss, rest, aux

        return stateful

    def transformation(self, optimizer: Any) -> Any:
        """Return optax's transformation; that of an `nnx.Optimizer` goes on from its state."""
        if isinstance(optimizer, dict):
            return {name: self.transformation(held) for name, held in optimizer.items()}
        if not isinstance(optimizer, self._nnx.Optimizer):
            return optimizer
        tx = optax.with_extra_args_support(optimizer.tx)
        return optax.GradientTransformationExtraArgs(lambda params: self._nnx.as_pure(optimizer.opt_state), tx.update)

    def write(self, arrays: Any, count: int, model: Any, optimizer: Any) -> None:
        """Write copies of (params, rest, opt_state) into the user's own modules and `nnx.Optimizer`."""
        self.split(model)
        params, rest, opt_state = jax.tree.map(lambda x: copied(x) if eqx.is_array(x) else x, arrays)
        for module, *states in zip(*map(self._modules, (model, params, rest)), strict=True):
            self._nnx.update(module, *states)
        if optimizer is not None:
            for held, new in zip(_members(optimizer), _members(opt_state, optimizer), strict=True):
                self._nnx.update(held.opt_state, self._nnx.state(new))
                held.step[...] = jnp.asarray(count, held.step[...].dtype)

    def _apart(self, model: Any) -> tuple[Any, Any, Any]:
        leaves, treedef = jax.tree.flatten(model, is_leaf=self._is_module)
        if other := [x for x in leaves if not self._is_module(x)]:
            raise ConfigError(f"model holds a {type(other[0]).__name__} beside a flax.nnx.Module; expected one kind")
        parts = [self._nnx.split(x, self.wrt, ...) for x in leaves]
        pure = [(_GraphDef(g), *self._nnx.as_pure((p, r))) for g, p, r in parts]
        graphdefs, params, rest = (treedef.unflatten(list(x)) for x in zip(*pure, strict=True))
        return graphdefs, params, rest

    def _modules(self, tree: Any) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda x: self._is_module(x) or isinstance(x, self._nnx.State))

    def _is_module(self, x: Any) -> bool:
        return isinstance(x, self._nnx.Module)


class _GraphDef:
    """A graphdef as a leaf of a tree, since it is a node to JAX."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GraphDef) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def _members(given: Any, like: Any = None) -> list[Any]:
    """The one that is given, or those of a dict, in the order of another one's names."""
    like = given if like is None else like
    return [given[name] for name in like] if isinstance(like, dict) else [given]


def require_no_module(model: Any) -> None:
    """Check that a tree holds no `flax.nnx.Module`: as a plain pytree, what a loss writes into one would be lost.

    Raises:
        ConfigError: if it holds one.

    """
    nnx = sys.modules.get("flax.nnx")
    is_module = lambda x: nnx is not None and isinstance(x, nnx.Module)  # noqa: E731
    if nnx is not None and any(map(is_module, jax.tree.leaves(model, is_leaf=is_module))):
        raise ConfigError("model holds a flax.nnx.Module; expected it alone, or in a dict, as the model of a TrainStep")


def require_none(nn_state: Any) -> None:
    """Check that no state is given beside a module that holds its own.

    Raises:
        ConfigError: if one is.

    """
    if nn_state is not None:
        raise ConfigError("nn_state: a flax.nnx.Module holds its state itself; leave it out")


def nnx_models(model: Any, optimizer: Any, wrt: Any) -> NnxModels | None:
    """Return the view of a model that is made of `flax.nnx.Module`, None of any other."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not any(isinstance(x, nnx.Module) for x in _members(model)):
        return None
    return NnxModels(nnx, model, optimizer, wrt)

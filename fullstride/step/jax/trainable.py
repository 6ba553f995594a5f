"""Selection of the trainable part of a model, and checks that two states have the same structure."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from fullstride.errors import ConfigError
from fullstride.step.jax.loss import describe
from fullstride.step.jax.nnx import require_no_module
from fullstride.step.jax.trees.ownership import private
from fullstride.step.jax.trees.structure import STATIC, Structure, assemble


def partitioned(model: Any, wrt: Any) -> tuple[Structure, Any, tuple[Any, ...]]:
    """Take a model apart.

    Returns:
        Its structure with the groups (trained, fixed); the model with its trained arrays only, None elsewhere; and the
        fixed arrays.

    Raises:
        ConfigError: if nothing is trained, or a trained leaf cannot be.

    """
    require_no_module(model)
    chosen = _chosen(model, wrt)
    leaves, treedef = jtu.tree_flatten(private(model))
    # In JAX's own dtypes: fp64 is none of them unless it is switched on.
    leaves = [jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in leaves]
    kept = treedef.flatten_up_to(chosen)
    slots = tuple(0 if k else 1 if _is_array(x) else STATIC for x, k in zip(leaves, kept, strict=True))
    for (path, leaf), slot in zip(jtu.tree_leaves_with_path(model), slots, strict=True):
        if slot == 0 and not (_is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)):
            raise ConfigError(
                f"wrt takes model{jtu.keystr(path)}, {describe(leaf)}; only floating arrays have gradients"
            )
    if 0 not in slots:
        raise ConfigError(f"model: no leaf of this {type(model).__name__} is trained; check the model and wrt")
    structure, (_, fixed) = assemble(treedef, leaves, slots, 2)
    params = jtu.tree_unflatten(treedef, [x if slot == 0 else None for x, slot in zip(leaves, slots, strict=True)])
    _expect_no_statistics(params)
    return structure, params, fixed


def _expect_no_statistics(params: Any) -> None:
    """An optimizer would train the old statistics, and the new ones would be lost."""
    is_state = lambda x: isinstance(x, eqx.nn.State)  # noqa: E731
    nodes = jtu.tree_leaves(params, is_leaf=is_state)
    if any(is_state(node) and jtu.tree_leaves(node) for node in nodes):
        raise ConfigError(
            "wrt takes an equinox.nn.State, such as BatchNorm's statistics, which no optimizer trains; give it as "
            "TrainStep(..., nn_state=state), or, if it is constant, exclude it from wrt"
        )


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _chosen(model: Any, wrt: Any) -> Any:
    """A tree of booleans for every leaf of the model."""

    def spread(spec: Any, part: Any) -> Any:
        return jtu.tree_map((lambda leaf: bool(spec(leaf))) if callable(spec) else lambda _: bool(spec), part)

    try:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves(model)):
            # A filter takes a shape for no array, but a traced array for one.
            return eqx.filter_eval_shape(lambda model: jtu.tree_map(spread, wrt, model), model)
        return jtu.tree_map(spread, wrt, model)
    except ValueError as error:
        raise ConfigError(f"wrt is no prefix of the model's tree: {str(error).splitlines()[0]}") from None


def checked_like(
    structure: Structure,
    leaves: Sequence[Any],
    expected: Structure,
    like: Sequence[Any],
    what: str = "the optimizer",
    kept: str = "its state or of the parameters; a step must keep both",
) -> None:
    """Check that a step's state has the structure, shapes and dtypes it had before.

    Raises:
        ConfigError: if it has not; the message names the leaf.

    """
    if structure is not expected:
        raise ConfigError(f"{what} changed the structure of {kept}")
    for name, new, old in zip(expected.names(), leaves, like, strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ConfigError(
                f"{what} turned {name.removeprefix('.')} from {describe(old)} into {describe(new)}; a step must keep "
                "shapes and dtypes"
            )

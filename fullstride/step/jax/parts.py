"""Parts of a step: a loss, the optimizer of its gradients, and the model that they train. Usually there is one.

Several models have a dict each of losses and of optimizers, by the model that each trains. A part that stands alone has
the name None.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fullstride.errors import ConfigError
from fullstride.step.jax.grouped import GroupedLeaves, grouped_layout
from fullstride.step.jax.loss import describe
from fullstride.step.jax.trainable import checked_like
from fullstride.step.jax.trees.structure import Place, Structure, split
from fullstride.step.jax.update import StepCarry, StepRecipe, update

Recipes = dict[Any, StepRecipe]


@dataclass
class Part:
    """Part of a step.

    Attributes:
        name: of the model that it trains.
        recipe: its loss and optimizer.
        carry: structure of its own `StepCarry`.
        leaves: the numbers of its leaves among the step's.
        trainable: number of trainable arrays, its first leaves.
        layout: layout of its leaves.
        buffers: the numbers of its buffers among the step's.

    """

    name: Any
    recipe: StepRecipe
    carry: Structure
    leaves: tuple[int, ...]
    trainable: int
    layout: GroupedLeaves
    buffers: tuple[int, ...] = ()


def recipes_of(loss_fn: Any, optimizer: Any, model: Any, make: Callable[..., StepRecipe]) -> Recipes:
    """Return the recipe of each part, in the order of the losses.

    Raises:
        ConfigError: if losses, optimizers and models do not go together.

    """
    if not isinstance(loss_fn, dict):
        return {None: make(loss_fn, optimizer)}
    for what, given in (("optimizer", optimizer), ("model", model)):
        if not isinstance(given, dict) or not loss_fn.keys() <= given.keys():
            got = f"has {_names(given)}" if isinstance(given, dict) else f"is {describe(given)}"
            raise ConfigError(f"{what} {got}; expected a dict with {_names(loss_fn)}, as loss_fn has it")
    if not loss_fn or len(optimizer) != len(loss_fn):
        raise ConfigError(f"optimizer has {_names(optimizer)}; expected one for each loss of loss_fn")
    return {name: make(loss, optimizer[name]) for name, loss in loss_fn.items()}


def _names(given: Any) -> str:
    return ", ".join(map(str, given)) or "nothing"


def filter_of(recipes: Recipes, wrt: Any, model: Any) -> Any:
    """Return the filter of what is trained: models that have no loss are not."""
    if None in recipes or isinstance(wrt, dict):
        return wrt
    return {name: wrt if name in recipes else False for name in model}


def start(recipes: Recipes, params: Any, nn_state: Any) -> StepCarry:
    """Return the carry before the first step."""
    if None in recipes:
        return recipes[None].start(params)._replace(nn_state=nn_state)
    if idle := [name for name, part in params.items() if bool(jax.tree.leaves(part)) != (name in recipes)]:
        raise ConfigError(f"wrt: expected to train every model that has a loss and no other; not so of {idle[0]}")
    carries = {name: recipe.start(params[name]) for name, recipe in recipes.items()}
    fields = ({name: getattr(carry, field) for name, carry in carries.items()} for field in StepCarry._fields[:-1])
    return StepCarry(*(None if all(x is None for x in field.values()) else field for field in fields))._replace(
        nn_state=nn_state
    )


def part_of(carry: StepCarry, name: Any) -> StepCarry:
    """Return one part's own carry."""
    if name is None:
        return carry._replace(nn_state=None)
    return StepCarry(*(None if field is None else field[name] for field in carry[:-1]))


def parts_of(recipes: Recipes, carry: Structure, leaves: tuple[Any, ...], grouped: bool) -> list[Part]:
    """Return the parts of a step with these leaves."""
    places, parts = carry.build(map(Place, range(len(leaves)))), []
    for name, recipe in recipes.items():
        own = part_of(places, name)
        shape, (found,) = split(own, lambda x: isinstance(x, Place))
        numbers, trainable = tuple(place.number for place in found), len(jax.tree.leaves(own.params))
        layout = GroupedLeaves(tuple((i,) for i in range(len(numbers))), trainable)
        if grouped:
            change = partial(changed, recipe, shape, jax.tree.structure(own.params))
            kinds, loss = [leaves[i] for i in numbers], jax.ShapeDtypeStruct((), jnp.float32)
            layout = grouped_layout(shape.paths(), kinds, trainable, change, loss)
        parts.append(Part(name, recipe, shape, numbers, trainable, layout))
    return parts


def joined(parts: list[Part], leaves: int, trainable: int) -> GroupedLeaves:
    """Return the layout of the whole state, and tell each part which of its buffers are its own."""
    own = [[tuple(part.leaves[i] for i in group) for group in part.layout.groups] for part in parts]
    taken = {i for part in parts for i in part.leaves}
    groups = sorted([*(group for of in own for group in of), *((i,) for i in range(leaves) if i not in taken)])
    places = {group: place for place, group in enumerate(groups)}
    for part, of in zip(parts, own, strict=True):
        part.buffers = tuple(map(places.__getitem__, of))
    return GroupedLeaves(tuple(groups), trainable)


def beside(recipe: StepRecipe, name: Any, params: Any, rest: Any) -> StepRecipe:
    """Return a recipe whose loss is given every model, of which it trains one; the others are as they are now."""
    models = {k: eqx.combine(params[k], rest[k]) if k in params else rest[k] for k in rest if k != name}
    others = recipe.precision.cast(models)
    if recipe.sharding is not None:
        others = recipe.sharding.gathered(others)
    return replace(recipe, loss_fn=lambda model, *given: recipe.loss_fn({**others, name: model}, *given))


def changed(
    recipe: StepRecipe, carry: Structure, shape: Any, leaves: Any, grads: Any, loss: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The update on flat leaves: the new ones, and the report."""
    new, report = update(recipe, carry.build(leaves), jax.tree.unflatten(shape, grads), loss)
    structure, (found,) = split(new, eqx.is_array)
    checked_like(structure, found, carry, leaves)
    # A weak type would have the next step traced again.
    return tuple(jax.lax.convert_element_type(x, x.dtype) for x in found), report


def reported(found: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of all parts: of several under `model/name`, beside the sum of the losses."""
    if None in found:
        return found[None]
    total = sum(metrics["loss"].astype(jnp.float32) for metrics in found.values())
    return {"loss": total} | {f"{name}/{key}": x for name, metrics in found.items() for key, x in metrics.items()}

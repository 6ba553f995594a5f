from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest

from fullstride.step.jax.trees.plans import RebuildPlan, UnplannableError
from fullstride.step.jax.trees.structure import split
from tests.step.jax.nets import Net


class Pair(NamedTuple):
    left: Any
    right: Any


class Odd(eqx.Module):
    pair: Pair
    plain: tuple
    words: dict
    kept: list
    function: Any
    size: int = eqx.field(static=True)


def _odd():
    inner = eqx.nn.Dropout(0.5)
    return Odd(
        Pair(np.ones(2), (3, np.zeros(1))), (inner, [np.arange(3)]), {"b": np.ones(4), "a": None}, [], np.tanh, 7
    )


@pytest.mark.parametrize(
    "make", [lambda: Net(0), _odd, lambda: eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))], ids=["net", "odd", "mlp"]
)
def test_a_plan_makes_what_jax_makes_and_fills_it_again(make):
    tree = make()
    structure, (leaves,) = split(tree)
    plan = RebuildPlan(structure)
    made, shells = plan.make(leaves)
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(tree), strict=True))
    other = tuple(x + 1 for x in leaves)
    plan.fill(shells, other)
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(split(made)[1][0], other, strict=True))


def test_trees_of_one_plan_share_no_list_or_dict():
    structure, (leaves,) = split(_odd())
    plan = RebuildPlan(structure)
    (first, _), (second, _) = plan.make(leaves), plan.make(leaves)
    assert first.kept is not second.kept
    assert first.words is not second.words
    assert first.plain[1] is not second.plain[1]


class Box:
    def __init__(self, value):
        self.value = value


def test_other_trees_are_left_to_jax():
    jax.tree_util.register_pytree_node(Box, lambda b: ((b.value,), None), lambda _, c: Box(*c))
    for tree in ({"a": np.ones(2)}, eqx.nn.Shared(Box(np.ones(2)), lambda b: b.value, lambda b: b.value)):
        with pytest.raises(UnplannableError):
            RebuildPlan(split(tree)[0])

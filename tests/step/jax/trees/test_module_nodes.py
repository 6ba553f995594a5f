from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from fullstride.step.jax.trees.plans import RebuildPlan
from fullstride.step.jax.trees.structure import split
from tests.step.jax.nets import Net


def test_who_holds_a_node_is_seen():
    structure, (leaves,) = split(Net(0))
    made, shells = RebuildPlan(structure).make(leaves)
    shells.sealed = shells.counts()
    assert shells.unshared()
    held = made.blocks[0].linear
    assert not shells.unshared()
    del held
    assert shells.unshared()
    made.blocks.append(None)
    assert not shells.unshared()


class Moments(NamedTuple):
    count: Any
    mean: Any


class Held(eqx.Module):
    state: tuple


def test_who_holds_a_tuple_is_seen():
    structure, (leaves,) = split(Held((Moments(np.ones(2), Net(0)), ())))
    made, shells = RebuildPlan(structure).make(leaves)
    shells.sealed = shells.counts()
    assert shells.unshared()
    held = made.state
    assert not shells.unshared()
    held = held[0]
    assert not shells.unshared()
    held = made.state[1]
    assert held == ()
    assert shells.unshared()
    given = vars(made)
    assert not shells.unshared()
    del given
    assert shells.unshared()


def test_a_kept_tree_holds_no_array():
    structure, (leaves,) = split(Held((Moments(np.ones(2), Net(0)), ())))
    plan = RebuildPlan(structure)
    made, shells = plan.make(leaves)
    node = made.state[0].mean
    plan.keep(shells)
    assert node.first.weight is None
    again, _ = plan.make(leaves)
    assert again.state[0].mean is node
    assert node.first.weight is leaves[1]

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax.structure import split
from tests.step.jax.nets import Net


def test_a_tree_comes_back_and_equal_trees_share_a_structure(seed):
    model = Net(seed)
    structure, (inexact, other) = split(model, eqx.is_inexact_array, eqx.is_array)
    assert (len(inexact), len(other)) == (8, 1)
    again = structure.build(inexact, other)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True))
    assert split(Net(seed + 1), eqx.is_inexact_array, eqx.is_array)[0] is structure
    assert split(model)[0] is not structure
    assert split(Net(seed, depth=3), eqx.is_inexact_array, eqx.is_array)[0] is not structure


def test_names_are_paths():
    structure, _ = split(Net(0), eqx.is_inexact_array, eqx.is_array)
    assert structure.names()[:3] == (".first.weight", ".first.bias", ".blocks[0].linear.weight")
    assert structure.names(1) == (".ids",)


def test_equal_numbers_of_other_types_are_told_apart():
    one, true, floating = ({"a": jnp.ones(2), "n": n} for n in (1, True, 1.0))
    assert len({split(tree)[0] for tree in (one, true, floating)}) == 3
    assert split({"a": jnp.zeros(3), "n": 1})[0] is split(one)[0]


def test_a_structure_lives_as_long_as_someone_holds_it():
    structure, _ = split({"a": jnp.ones(2), "only": "here"})
    alive = weakref.ref(structure)
    del structure
    gc.collect()
    assert alive() is None


def test_a_static_leaf_that_cannot_be_hashed():
    with pytest.raises(ConfigError, match=r"the leaf \['s'\] is a set, which is neither an array nor hashable"):
        split({"a": jnp.ones(2), "s": {1}})

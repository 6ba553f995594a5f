import gc
import weakref
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import cached_filter_jit
from fullstride.step.jax.trees.structure import split
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


@dataclass(frozen=True)
class Sizes:
    width: Any


class Scaled(eqx.Module):
    x: jax.Array
    by: Any = eqx.field(static=True)


def test_equal_numbers_of_other_types_in_static_fields_are_told_apart():
    numbers = (2, 2.0, (2,), (2.0,), ("a", (2,)), ("a", (2.0,)), *map(Sizes, (2, 2.0, np.float32(2))))
    kept = [split({"m": Scaled(jnp.arange(3), n)}) for n in numbers]
    assert len({structure for structure, _ in kept}) == len(numbers)
    for (structure, (leaves,)), n in zip(kept, numbers, strict=True):
        by = structure.build(leaves)["m"].by
        assert repr(by) == repr(n)


def test_functions_of_equal_fields_of_other_types_do_not_meet():
    whole, floating = (Scaled(jnp.arange(3), n) for n in (2, 2.0))
    assert cached_filter_jit(lambda m: jnp.full(3, m.by))(whole).dtype == jnp.int32
    assert cached_filter_jit(lambda m: jnp.full(3, m.by))(floating).dtype == jnp.float32
    assert isinstance(cached_filter_jit(lambda m: m)(floating).by, float)


def test_a_structure_lives_as_long_as_someone_holds_it():
    structure, _ = split({"a": jnp.ones(2), "only": "here"})
    alive = weakref.ref(structure)
    del structure
    gc.collect(1)  # it is young, and all of a test process takes seconds
    assert alive() is None


def test_a_static_leaf_that_cannot_be_hashed():
    with pytest.raises(ConfigError, match=r"the leaf \['s'\] is a set, which is neither an array nor hashable"):
        split({"a": jnp.ones(2), "s": {1}})

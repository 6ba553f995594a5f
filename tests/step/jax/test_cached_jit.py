import functools
import gc
import warnings
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from fullstride.errors import ConfigError
from fullstride.step.jax import cached_filter_jit
from fullstride.step.jax.trees import memo
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, squared

WRAPPERS = pytest.mark.parametrize("jit", [eqx.filter_jit, cached_filter_jit], ids=["filter_jit", "cached"])


def doubled(tree):
    return jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, tree)


@pytest.mark.parametrize("donate", ["none", "all-except-first"])
def test_a_training_loop_gives_what_filter_jit_gives(seed, donate):
    def step(batch, model, opt_state):
        loss, grads = eqx.filter_value_and_grad(squared)(model, batch, None)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = adam().update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    model, batches = Net(seed), [batch_of(seed + i) for i in range(4)]
    expected = plain_loop(model, adam(), batches)
    model, opt_state = Net(seed), adam().init(eqx.filter(model, eqx.is_inexact_array))
    jitted, losses = cached_filter_jit(step, donate=donate), []
    for batch in batches:
        model, opt_state, loss = jitted(batch, model, opt_state)
        losses.append(float(loss))
    assert_trees(model, expected[0])
    assert_trees(opt_state, expected[1])
    np.testing.assert_allclose(losses, expected[2], rtol=1e-5)


@WRAPPERS
def test_arrays_are_traced_and_the_rest_is_static(jit):
    traces = 0

    @jit
    def f(x, y, *, flag="a"):
        nonlocal traces
        traces += 1
        assert isinstance(x, Tracer)
        return (x + y, y, flag, None) if isinstance(y, int) else x - y

    assert f(jnp.array(1), 2)[1:] == (2, "a", None)
    assert f(jnp.array(5), y=2)[0] == 7
    assert traces == 1
    f(jnp.array(1), 3)
    f(jnp.array(1), 2, flag="b")
    assert traces == 3
    f(np.array(1), jnp.array(2))
    f(jnp.array(1), np.array(2))
    assert traces == 5
    f(jnp.array([1, 2]), np.array(2))
    assert traces == 6


@WRAPPERS
def test_closures_methods_partials_and_modules(jit):
    factor = jnp.asarray(3.0)
    assert jit(lambda x: x * factor)(jnp.asarray(2.0)) == 6
    assert jit(functools.partial(lambda x, y: x - y, y=1.0))(jnp.asarray(2.0)) == 1

    class Scaled(eqx.Module):
        weight: jax.Array

        @jit
        def by(self, x):
            assert isinstance(self.weight, Tracer)
            return self.weight * x

        def __call__(self, x):
            return self.weight + x

    module = Scaled(jnp.asarray(4.0))
    assert module.by(jnp.asarray(2.0)) == 8
    assert Scaled.by(module, jnp.asarray(2.0)) == 8
    assert jit(module)(jnp.asarray(2.0)) == 6
    assert jit(module.__call__)(jnp.asarray(3.0)) == 7


@WRAPPERS
def test_the_functions_own_arrays_are_traced(jit):
    traces = 0

    class Counted(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            nonlocal traces
            traces += 1
            return self.weight * x

    first, second = jit(Counted(jnp.asarray(2.0))), jit(Counted(jnp.asarray(5.0)))
    assert (first(jnp.asarray(1.0)), second(jnp.asarray(1.0))) == (2, 5)
    assert traces == 1
    assert [float(x) for x in jax.tree.leaves(eqx.filter(first, eqx.is_array))] == [2.0]


@WRAPPERS
def test_a_result_may_depend_on_shapes(jit):
    f = jit(lambda x: (x, x.shape[0], {"name": str(x.dtype)}))
    assert f(jnp.zeros(3))[1:] == (3, {"name": "float32"})
    assert f(jnp.zeros(4))[1:] == (4, {"name": "float32"})
    assert f(jnp.zeros(3))[1] == 3


@WRAPPERS
def test_arguments_that_come_back_and_come_back_twice(jit):
    model = Net(0)
    same, twice, plain = jit(lambda m: (m, [m, m], m.name))(model)
    for out in (same, *twice):
        assert_trees(out, model, 0, 0)
    assert plain == "net"
    a, b = jit(lambda x: (x, x))(jnp.arange(3))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.blocks.append(m.blocks[0]),
        lambda m: m.blocks.pop(),
        lambda m: m.blocks.__setitem__(0, jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, m.blocks[1])),
        lambda m: m.blocks.reverse(),
    ],
)
def test_a_list_that_was_changed_is_seen(change):
    function = cached_filter_jit(lambda m, x: m(x))
    model, x = cached_filter_jit(doubled)(Net(0)), jnp.arange(3.0)
    function(model, x)
    change(model)
    np.testing.assert_allclose(function(model, x), eqx.filter_jit(lambda m, x: m(x))(model, x), rtol=1e-6)


def test_a_dict_that_was_changed_is_seen():
    class Holder(eqx.Module):
        kept: dict

    function = cached_filter_jit(lambda h: sum(h.kept.values()))
    holder = Holder({"a": jnp.asarray(1.0)})
    assert function(holder) == 1
    holder.kept["a"] = jnp.asarray(5.0)
    assert function(holder) == 5
    holder.kept["b"] = jnp.asarray(2.0)
    assert function(holder) == 7


@pytest.mark.parametrize("kind", [OrderedDict, functools.partial(defaultdict, int)], ids=["ordered", "default"])
@pytest.mark.parametrize("inside", [lambda kept: kept, lambda kept: (3, Frozen(kept))], ids=["itself", "deeper"])
def test_a_dict_of_another_kind_that_was_changed_is_seen(kind, inside):
    kept = kind()
    holder = Held(jnp.ones(2), inside(kept))

    def function(h):
        return h.x * sum(x for x in jax.tree.leaves(h.kept)), h

    cached, plain = cached_filter_jit(function), eqx.filter_jit(function)
    for n in (0, 5, 7):
        kept |= {"n": n} if n else {}
        (y, out), (expected, _) = cached(holder), plain(holder)
        np.testing.assert_array_equal(y, expected)
        # A result's own is no other result's.
        other = cached(holder)[1]
        _first_dict(out.kept)["n"] = -1
        assert _first_dict(other.kept) == ({"n": n} if n else {})


class Held(eqx.Module):
    x: jax.Array
    kept: Any


class Frozen(eqx.Module):
    inside: Any


def _first_dict(kept: Any) -> Any:
    return kept[1].inside if isinstance(kept, tuple) else kept


def test_a_changed_structure_or_static_field_is_traced_again():
    traces = 0

    @cached_filter_jit
    def f(model, x):
        nonlocal traces
        traces += 1
        return model(x)

    model, x = Net(0), jnp.arange(3.0)
    for changed in (model, Net(1), eqx.tree_at(lambda m: m.last.bias, model, jnp.zeros(2))):
        f(changed, x)
    assert traces == 1
    f(eqx.tree_at(lambda m: m.name, model, "other"), x)
    f(Net(0, depth=3), x)
    f(eqx.tree_at(lambda m: m.ids, model, jnp.arange(5).astype("int8")), x)
    assert traces == 4


def test_donated_buffers_are_gone_and_others_are_not():
    f = cached_filter_jit(lambda kept, given: (doubled(given), kept), donate="all-except-first")
    kept, given = Net(0), Net(1)
    f(kept, given)
    assert all(x.is_deleted() for x in jax.tree.leaves(eqx.filter(given, eqx.is_array)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(eqx.filter(kept, eqx.is_array)))
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        f(kept, given)


@pytest.mark.parametrize(("donate", "warns"), [("all", False), ("warn", True)])
def test_buffers_that_no_result_can_use_are_warned_of_where_asked(donate, warns):
    f = cached_filter_jit(lambda x: x.sum(), donate=donate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(jnp.ones(3))
        f(jnp.ones(4))
    assert len([w for w in caught if "donated buffers were not usable" in str(w.message)]) == 2 * warns


def test_results_go_into_donated_modules_that_nobody_else_holds():
    f = cached_filter_jit(doubled, donate="all")
    model = f(Net(0))
    first = id(model)
    weight = 1 * model.blocks[1].linear.weight
    model = f(model)
    assert id(model) == first

    held = model
    model = f(model)
    assert model is not held
    assert all(x.is_deleted() for x in jax.tree.leaves(eqx.filter(held, eqx.is_array)))

    part = model.blocks[1]
    model = f(model)
    assert model.blocks[1] is not part
    assert part.linear.weight.is_deleted()
    np.testing.assert_array_equal(model.blocks[1].linear.weight, 8 * weight)


def test_a_module_whose_buffers_were_not_reused_stays_as_it_is():
    f = cached_filter_jit(doubled, donate="all")
    model = f(Net(0))
    view = np.asarray(model.last.weight)
    model = f(model)
    np.testing.assert_array_equal(model.last.weight, 2 * view)


def test_modules_inside_of_other_trees_are_used_again_too():
    f = cached_filter_jit(doubled, donate="all")
    state = f({"a": Net(0), "pair": (Net(1), jnp.ones(2))})
    known = {id(state["a"]), id(state["pair"][0])}
    state = f(state)
    assert {id(state["a"]), id(state["pair"][0])} == known
    inner = state["pair"][0]
    state = f(state)
    assert state["pair"][0] is not inner
    whole = state
    state = f(state)
    assert state["a"] is not whole["a"]
    np.testing.assert_array_equal(state["pair"][1], [16.0, 16.0])


def test_a_module_that_is_not_donated_is_never_written_to():
    f = cached_filter_jit(doubled)
    model = f(Net(0))
    before = np.asarray(model.last.bias)
    again = f(model)
    assert again is not model
    np.testing.assert_array_equal(model.last.bias, before)


def test_a_cached_property_of_a_donated_module_is_not_kept():
    class Root(eqx.Module):
        inner: eqx.Module

    class Inner(eqx.Module):
        w: jax.Array

        @functools.cached_property
        def double(self):
            return float(2 * self.w)

    f = cached_filter_jit(doubled, donate="all")
    root = f(Root(Inner(jnp.asarray(1.0))))
    assert root.inner.double == 4
    root = f(root)
    assert root.inner.double == 8


def test_memory_ends_with_the_module():
    f = cached_filter_jit(doubled)
    model = f(Net(0))
    module, leaf = weakref.ref(model), weakref.ref(model.last.weight)
    del model
    gc.collect()
    assert module() is None
    assert leaf() is None


def test_other_transformations_around_and_inside():
    f = cached_filter_jit(lambda m, x: m(x).sum())
    model, xs = Net(0), jnp.asarray(batch_of(0)["x"])
    plain = eqx.filter_jit(lambda m, x: m(x).sum())
    assert_trees(eqx.filter_grad(f)(model, xs[0]), eqx.filter_grad(plain)(model, xs[0]))
    np.testing.assert_allclose(jax.vmap(lambda x: f(model, x))(xs), jax.vmap(lambda x: plain(model, x))(xs), rtol=1e-5)
    nested = cached_filter_jit(lambda m, x: f(doubled(m), x))
    np.testing.assert_allclose(nested(model, xs[0]), plain(doubled(model), xs[0]), rtol=1e-5)
    np.testing.assert_allclose(f(model, xs[0]), plain(model, xs[0]), rtol=1e-5)


@WRAPPERS
def test_error_if_is_raised_by_the_call_itself(jit):
    @jit
    def f(x):
        return eqx.error_if(x, x > 3, "x is above 3")

    assert f(jnp.asarray(1.0)) == 1
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is above 3"):
        f(jnp.asarray(4.0))
    assert f(jnp.asarray(2.0)) == 2


@WRAPPERS
def test_ahead_of_time(jit):
    traces = 0

    def called(m, x):
        nonlocal traces
        traces += 1
        return m(x), m.name

    f = jit(called)
    lowered = f.lower(Net(0), jnp.arange(3.0))
    assert "module" in lowered.as_text()
    compiled = lowered.compile()
    out, name = compiled(Net(1), jnp.arange(3.0))
    assert name == "net"
    np.testing.assert_allclose(out, f(Net(1), jnp.arange(3.0))[0], rtol=1e-6)
    assert traces == 1


def test_wrapping_again_compiles_nothing():
    traces = 0

    def f(x):
        nonlocal traces
        traces += 1
        return x + 1

    for _ in range(3):
        cached_filter_jit(f)(jnp.ones(3))
    assert traces == 1
    cached_filter_jit(f, donate="all")(jnp.ones(3))
    assert traces == 2


def test_options_of_the_compiler_are_handed_on_and_tell_wrappers_apart():
    traces = []

    def double(x):
        traces.append(1)
        return 2 * x

    for quick in (True, False, True):
        wrapped = cached_filter_jit(double, compiler_options={"xla_cpu_enable_fast_math": quick})
        assert wrapped(jnp.ones(2)).tolist() == [2, 2]
    assert len(traces) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'none'"):
        cached_filter_jit(double, compiler_options={"none": True})(jnp.ones(2))


def test_modules_with_tuples_of_arrays_and_foreign_nodes():
    class Odd(eqx.Module):
        pair: tuple
        state: tuple
        mapping: dict
        empty: eqx.Module | None

    class Foreign(eqx.Module):
        inside: object

    jax.tree_util.register_pytree_node(_Box, lambda b: ((b.value,), None), lambda _, c: _Box(*c))
    odd = Odd(
        (jnp.ones(2), (3, jnp.ones(1))),
        Named(jnp.asarray(0), Net(0)),
        {"k": [jnp.ones(3)]},
        None,
    )
    for tree in (odd, Foreign(_Box(jnp.ones(2)))):
        f = cached_filter_jit(doubled, donate="all")
        expected = doubled(doubled(tree))
        out = f(jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, tree))
        out = f(out)
        assert_trees(out, expected, 0, 0)


class Named(NamedTuple):
    number: jax.Array
    tree: Any


class _Box:
    def __init__(self, value):
        self.value = value


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="donate=some: expected one of"):
        cached_filter_jit(doubled, donate="some")
    with pytest.raises(ConfigError, match="static_argnums: not an option here"):
        cached_filter_jit(doubled, static_argnums=1)
    with pytest.raises(TypeError, match="missing a required argument"):
        cached_filter_jit(doubled)()


def test_dead_results_lend_their_nodes_to_the_next():
    f, model = cached_filter_jit(doubled), Net(0)
    model = f(model)
    nodes = []
    for _ in range(4):
        nodes.append((id(model.first), id(model.blocks), id(model.blocks[1].linear)))
        model = f(model)
    # The first result is alive while the second is made.
    assert nodes[0] == nodes[2] != nodes[1] == nodes[3]
    np.testing.assert_array_equal(model.last.weight, 32 * Net(0).last.weight)
    assert model.blocks[1].linear.bias is memo.read(model).leaves[5]


@pytest.mark.parametrize(
    "hold",
    [
        lambda m: m,
        lambda m: m.first,
        lambda m: m.blocks,
        lambda m: m.blocks[1].linear,
        vars,
        lambda m: eqx.tree_at(lambda x: x.last, m, None),
        lambda m: jax.tree.leaves(m, is_leaf=lambda x: isinstance(x, eqx.nn.Linear)),
    ],
    ids=["model", "module", "list", "deep", "vars", "changed", "leaves"],
)
def test_what_somebody_holds_of_a_dead_result_stays(hold):
    f = cached_filter_jit(doubled)
    model = f(Net(0))
    held = hold(model)
    before = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, held)
    for _ in range(5):
        model = f(model)
    assert_trees(held, before, 0, 0)
    np.testing.assert_array_equal(model.last.weight, 64 * Net(0).last.weight)


def test_a_list_that_was_changed_is_not_lent():
    f = cached_filter_jit(doubled)
    model = f(Net(0))
    model.blocks.reverse()
    for _ in range(4):
        model = f(model)
    expected = [32 * block.linear.weight for block in reversed(Net(0).blocks)]
    for block, weight in zip(model.blocks, expected, strict=True):
        np.testing.assert_array_equal(block.linear.weight, weight)

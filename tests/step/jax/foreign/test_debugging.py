"""Messages and values that somebody else's loop sees when something is wrong, or when it looks."""

import traceback
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import (
    Optimizer,
    RetraceWarning,
    TrainStep,
    cached_filter_jit,
    make_train_step,
    make_train_step_with_partition,
)
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, squared


class Dropped(eqx.Module):
    net: Net
    dropout: eqx.nn.Dropout
    limits: tuple = eqx.field(static=True)

    def __init__(self, p: float, limits: tuple = (1, 2.5)):
        self.net = Net(3)
        self.dropout = eqx.nn.Dropout(p)
        self.limits = limits

    def __call__(self, x: Any) -> Any:
        return self.net(x)


def test_static_values_are_named_with_both():
    tx = optax.adamw(1e-2)
    optimizer = Optimizer.create(tx, Dropped(0.1))
    step = make_train_step(squared, donate=False)
    model = Dropped(0.1)
    step(model, optimizer, batch_of(0))

    def cause(model: Any, optimizer: Any = optimizer, batch: Any = None) -> str:
        with pytest.warns(RetraceWarning) as found:
            step(model, optimizer, batch or batch_of(0))
        return str(found[0].message).partition(": ")[2]

    assert cause(Dropped(0.25)) == "model.dropout.p was 0.1, now 0.25"
    assert cause(eqx.nn.inference_mode(model)) == "model.dropout.inference was False, now True"
    assert cause(eqx.tree_at(lambda m: m.net.name, model, "n2")) == "model.net.name was 'net', now 'n2'"
    assert cause(model, batch=batch_of(0) | {"part": 1}) == "batch['part'] was absent, now 1"
    assert cause(model, batch=batch_of(0) | {"part": True}) == "batch['part'] was 1, now True"
    other = Dropped(0.1, (1, 3.5))
    found = cause(other, Optimizer.create(tx, other))
    assert found.startswith("model.limits[1] was 2.5, now 3.5; optimizer.opt_state[0].mu.limits[1] was 2.5")
    rate = cause(model, Optimizer.create(optax.adamw(5e-3), model))
    assert rate == "optimizer.tx.update.update_fns[2].tx.update.step_size was -0.01, now -0.005"
    # The same again, but another object.
    again = cause(model, Optimizer.create(optax.adamw(1e-2), model))
    assert again.startswith("optimizer.tx.init was <function chain.<locals>.init_fn at 0x")
    assert step.traces == 9
    with warnings.catch_warnings(action="error"):
        step(model, optimizer, batch_of(1))


def test_a_static_field_of_a_batch_is_named():
    class Batch(eqx.Module):
        x: Any
        scale: int = eqx.field(static=True)

    step = TrainStep(lambda m, b, k: jnp.mean(jax.vmap(m)(b.x)) * b.scale, adam(), Net(0))
    state, _ = step(step.init(), Batch(batch_of(0)["x"], 2))
    with pytest.warns(RetraceWarning, match=r"trace 2\): batch\.scale was 2, now 3$"):
        step(state, Batch(batch_of(0)["x"], 3))


@pytest.mark.parametrize(
    "form", ["flat", "grouped", pytest.param("accumulated", marks=pytest.mark.thorough), "call", "partition"]
)
def test_without_jit_a_loop_gives_the_same_and_warns_of_nothing(form):
    batches = [batch_of(5 + i) for i in range(2)]
    expected = plain_loop(Net(1), adam(), batches)
    with jax.disable_jit(), warnings.catch_warnings(action="error", category=RetraceWarning):
        if form == "call":
            step, model = make_train_step(squared, on_retrace="raise"), Net(1)
            optimizer = Optimizer.create(adam(), model)
            for batch in batches:
                model, optimizer, _ = step(model, optimizer, batch)
        elif form == "partition":
            step = make_train_step_with_partition(squared, adam(), Net(1))
            params, opt_state = step.params, step.opt_state
            for batch in batches:
                params, opt_state, _ = step(params, opt_state, batch)
            model = step.combine(params)
        else:
            options: dict[str, Any] = {"accumulate": 2} if form == "accumulated" else {"layout": form}
            step = TrainStep(squared, adam(), Net(1), on_retrace="raise", **options)
            state = step.init()
            for batch in batches:
                state, _ = step(state, batch)
            model = state.model
    assert_trees(model, expected[0])


def test_without_jit_a_cached_function_runs_once_a_call_on_real_arrays():
    seen = []

    @cached_filter_jit
    def function(model: Any, x: Any) -> Any:
        seen.append(float(x[0]))
        return model(x)

    with jax.disable_jit():
        for i in range(3):
            function(Net(0), jnp.full(3, 1.5 + i))
    assert seen == [1.5, 2.5, 3.5]


def checked(x: Any, limit: Any) -> Any:
    return eqx.error_if(x, x > limit, f"above {limit}")


def raised(call: Any) -> str:
    with pytest.raises(eqx.EquinoxRuntimeError) as found:
        call()
    return "".join(traceback.format_exception(found.value))


def test_a_runtime_error_has_the_stack_and_the_advice_of_filter_jit():
    texts = []
    for jit, limit in ((eqx.filter_jit, 3), (cached_filter_jit, 4)):

        def f(x: Any, limit: int = limit) -> Any:
            return 2 * checked(x, limit)

        text = raised(lambda jit=jit, f=f: jit(f)(jnp.asarray(9.0)))
        assert text.index("return 2 * checked(x, limit)") < text.index("return eqx.error_if(x, x > limit")
        texts.append(text.partition(f"EquinoxRuntimeError: above {limit}")[2])
    assert "EQX_ON_ERROR=breakpoint" in texts[0]
    assert texts[0] == texts[1]


def test_a_steps_runtime_error_says_the_step_first_and_has_them_in_a_note():
    step = TrainStep(lambda m, b, k: checked(squared(m, b, k), -5), adam(), Net(0))

    def run() -> None:
        step(step.init(), batch_of(0))
        step.finish()

    with pytest.raises(eqx.EquinoxRuntimeError) as found:
        run()
    assert str(found.value) == "above -5 (step 1)"
    text = raised(run)
    assert "return eqx.error_if(x, x > limit" in text
    assert "EQX_ON_ERROR=breakpoint" in text


def test_functions_say_what_they_are():
    name = f"{__name__}.checked"
    assert repr(cached_filter_jit(checked)) == f"cached_filter_jit({name})"
    assert repr(cached_filter_jit(donate="all")(checked)) == f"cached_filter_jit({name}, donate='all')"
    assert repr(cached_filter_jit(eqx.nn.Identity())) == "cached_filter_jit(Identity())"
    assert repr(make_train_step(squared)) == "make_train_step(tests.step.jax.nets.squared)"


def test_the_loss_is_kept_beside_aux():
    def with_aux(model: Any, batch: Any, key: Any) -> Any:
        return squared(model, batch, key), {"rows": jnp.asarray(len(batch["x"]))}

    batches = [batch_of(i) for i in range(3)]
    *_, expected = plain_loop(Net(2), adam(), batches)
    call, model, optimizer = make_train_step(with_aux), Net(2), Optimizer.create(adam(), Net(2))
    parted, losses = make_train_step_with_partition(with_aux, adam(), Net(2)), []
    params, opt_state = parted.params, parted.opt_state
    assert call.loss is None is parted.loss
    for batch in batches:
        model, optimizer, aux = call(model, optimizer, batch)
        params, opt_state, parts = parted(params, opt_state, batch)
        assert int(aux["rows"]) == int(parts["rows"]) == 6
        losses.append((float(call.loss), float(parted.loss)))
    np.testing.assert_allclose(losses, [(x, x) for x in expected], rtol=1e-5)


@pytest.mark.parametrize("tx", [optax.lookahead(optax.sgd(0.1), 2, 0.5), optax.chain(optax.lookahead(adam(), 5, 0.1))])
def test_lookahead_is_refused_in_a_line(tx):
    def flat() -> None:
        step = TrainStep(squared, tx, Net(0))
        step(step.init(), batch_of(0))

    def call() -> None:
        make_train_step(squared)(Net(0), Optimizer.create(tx, Net(0)), batch_of(0))

    for made in (flat, call):
        with pytest.raises(ConfigError, match="optax.lookahead trains a pair of fast and slow parameters"):
            made()


def test_an_optimizer_of_another_model_is_refused_by_what_differs():
    optimizer = Optimizer.create(optax.adam(1e-3), Dropped(0.1))
    with pytest.raises(ConfigError, match=r"trees of two kinds .* Optimizer.create\(tx, model\)"):
        make_train_step(squared)(Dropped(0.1, ("other",)), optimizer, batch_of(0))

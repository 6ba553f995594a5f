"""How a step puts the model together anew is gone once it is compiled: XLA's program is the same."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import optax
import pytest

from benchmarks.cases.step_jax.real import OPERATION
from fullstride.step.jax import Optimizer, TrainStep, cached_filter_jit
from tests.step.jax.nets import Net, adam, batch_of, squared

# Such as what counts the steps: a parameter, an addition and what is around them.
FEW = 8


def _trained(model):
    linears = (model.first, *(block.linear for block in model.blocks), model.last)
    return [x for linear in linears for x in (linear.weight, linear.bias)]


def _gradients(model, batch):
    return eqx.filter_value_and_grad(squared)(model, batch, None)


def _by_tree_at(model, opt_state, batch):
    loss, grads = _gradients(model, batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = adam().update(grads, opt_state, params)
    return eqx.tree_at(_trained, model, _trained(optax.apply_updates(params, updates))), opt_state, loss


def _by_apply_updates(model, opt_state, batch):
    loss, grads = _gradients(model, batch)
    updates, opt_state = adam().update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def _by_optimizer(model, optimizer, batch):
    loss, grads = _gradients(model, batch)
    return *optimizer(grads, model), loss


def _operations(executable: Any) -> Counter:
    return Counter(OPERATION.findall(executable.as_text()))


def _compiled(wrap: Any, step: Any, *args: Any) -> Counter:
    return _operations(wrap(step).lower(*args).compile().compiled)


@pytest.fixture(autouse=True)
def _promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_tree_at_and_an_optimizer_compile_away():
    model, batch = Net(0), jax.device_put(batch_of(0))
    optimizer = Optimizer.create(adam(), model)
    plain = _compiled(eqx.filter_jit, _by_apply_updates, model, optimizer.opt_state, batch)
    assert plain["dot"] > 0
    assert plain.total() > 500
    assert _compiled(eqx.filter_jit, _by_tree_at, model, optimizer.opt_state, batch) == plain
    assert _compiled(eqx.filter_jit, _by_optimizer, model, optimizer, batch) == plain

    cached = _compiled(cached_filter_jit, _by_tree_at, model, optimizer.opt_state, batch)
    mine = _operations(TrainStep(squared, adam(), model).compile(batch).executable)
    for found in (cached, mine):
        assert ((found - plain) + (plain - found)).total() <= FEW
        assert (found["dot"], found["multiply"]) == (plain["dot"], plain["multiply"])

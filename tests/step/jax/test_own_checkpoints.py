"""Checkpoints of a user's own loop, by Equinox and by Orbax, go into a state and come out of it bit for bit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, plain_loop, run, squared

BATCHES = [batch_of(i) for i in range(4)]


def _like() -> Any:
    return Net(1), adam().init(eqx.filter(Net(1), eqx.is_inexact_array))


def _by_equinox(path: Any, trees: Any) -> Any:
    eqx.tree_serialise_leaves(path / "run.eqx", trees)
    return eqx.tree_deserialise_leaves(path / "run.eqx", _like())


def _by_orbax(path: Any, trees: Any) -> Any:
    arrays, rest = eqx.partition(trees, eqx.is_array)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "run", arrays)
        checkpointer.wait_until_finished()
        return eqx.combine(checkpointer.restore(path / "run", eqx.filter(_like(), eqx.is_array)), rest)


@pytest.fixture(scope="module")
def loops():
    """Model, optimizer state and losses after two and after four steps of the loop by hand."""
    return [plain_loop(Net(0), adam(), BATCHES[:count]) for count in (2, 4)]


@pytest.mark.parametrize(("through", "layout"), [(_by_equinox, "grouped"), (_by_orbax, "flat")])
def test_a_checkpoint_of_ones_own_goes_in_and_comes_out(through, layout, loops, tmp_path):
    (model, opt_state, _), (end, end_state, losses) = loops
    model, opt_state = through(tmp_path, (model, opt_state))
    step = TrainStep(squared, adam(), Net(1), layout=layout)
    state, found = run(step, BATCHES[2:], state=step.init(model, opt_state=opt_state, step=2))
    assert found == losses[2:]
    assert state.step == int(state.carry.taken) == 4
    (tmp_path / "end").mkdir()
    for trees in ((state.model, state.opt_state), through(tmp_path / "end", (state.model, state.opt_state))):
        assert_trees(trees, (end, end_state), 0, 0)


def test_an_average_of_ones_own_goes_on():
    step = TrainStep(squared, adam(), Net(0), ema=0.5)
    middle, _ = run(step, BATCHES[:2])
    kept = jax.tree.map(np.asarray, eqx.filter((middle.model, middle.opt_state, middle.ema_model), eqx.is_array))
    model, opt_state, average = eqx.combine(kept, (middle.model, middle.opt_state, middle.ema_model))
    end, _ = run(step, BATCHES[2:], state=middle)
    again = step.init(model, opt_state=opt_state, ema_model=average, step=2)
    assert_trees(run(step, BATCHES[2:], state=again)[0].ema_model, end.ema_model, 0, 0)
    with pytest.raises(ConfigError, match="ema_model: this step keeps no average"):
        TrainStep(squared, adam(), Net(0)).init(ema_model=Net(0))


def test_an_optimizer_state_of_another_kind_is_refused():
    step = TrainStep(squared, adam(), Net(0))
    with pytest.raises(ConfigError, match=r"init\(\) changed the structure of its state .* this model and optimizer"):
        step.init(opt_state=adam().init(eqx.filter(Net(0, depth=3), eqx.is_inexact_array)))
    wide = jax.tree.map(lambda x: jnp.stack([x, x]), adam().init(eqx.filter(Net(0), eqx.is_inexact_array)))
    with pytest.raises(ConfigError, match=r"init\(\) turned opt_state\[\d\].* from int32\[\] into int32\[2\]"):
        step.init(opt_state=wide)

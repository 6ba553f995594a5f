import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from tests.step.jax.nets import Net, adam, assert_trees, batch_of, run, squared


def _not_biases(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _by_name(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "slow" if "blocks[1]" in jax.tree_util.keystr(path) else "fast", params
    )


OPTIMIZERS = {
    # The whole gradient's norm, a schedule, and leaves of one dimension treated differently.
    "clipped adamw": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.03, 0, 9), mask=_not_biases)),
        5 * 3 + 3,
    ),
    # Norms of single leaves.
    "lamb": (optax.lamb(1e-2), 5 * 3 + 2),
    # Rows and columns, and leaves that hold nothing.
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=2), None),
    # One layer of four by itself.
    "by name": (optax.multi_transform({"fast": optax.sgd(0.1, 0.9), "slow": optax.sgd(0.01, 0.9)}, _by_name), None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_the_flat_layout(name):
    optimizer, buffers = OPTIMIZERS[name]
    batches = [batch_of(i) for i in range(3)]
    flat, losses = run(TrainStep(squared, optimizer, Net(0, depth=3)), batches)
    grouped, same = run(TrainStep(squared, optimizer, Net(0, depth=3), layout="grouped"), batches)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    assert_trees(grouped.model, flat.model)
    assert_trees(grouped.opt_state, flat.opt_state)
    assert len(grouped.buffers) < len(flat.buffers)
    assert buffers is None or len(grouped.buffers) == buffers


def test_everything_else_goes_with_it():
    settings = {"ema": 0.9, "precision": "fp16", "grad_norm": True}
    batches = [batch_of(i) for i in range(2)]
    steps = [TrainStep(squared, adam(), Net(0, depth=3), layout=layout, **settings) for layout in ("flat", "grouped")]
    (flat, losses), (grouped, same) = (run(step, batches) for step in steps)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    assert_trees(grouped.ema_model, flat.ema_model)
    for name, value in steps[0].finish().items():
        np.testing.assert_allclose(steps[1].finish()[name], value, rtol=1e-4)
    assert steps[1].traces == 1


def test_no_copy_of_a_group_is_in_the_compiled_step():
    step = TrainStep(squared, adam(), Net(0, depth=6, width=16), layout="grouped", ema=0.9)
    state = step.init()
    text = step.compile(batch_of(0, 32)).hlo
    shapes = {f"{_short(x)}[{','.join(map(str, x.shape))}]" for x in state.buffers if x.ndim and x.shape[0] >= 6}
    assert {"f32[6,16,16]", "f32[7,16]"} <= shapes
    copied = set(re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text))
    assert not copied & shapes
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliased
    assert len(re.findall(r"may-alias|must-alias", aliased[1])) == len(state.buffers)


def _short(x):
    return {"float32": "f32", "int32": "s32"}[x.dtype.name]


def test_a_model_of_one_array_has_nothing_to_group():
    step = TrainStep(lambda m, b, k: jnp.sum((m - b) ** 2), optax.adam(0.1), jnp.zeros(3), layout="grouped")
    state, losses = run(step, [np.ones(3, "f")] * 3)
    assert len(state.buffers) == 5
    assert losses[2] < losses[0]


def test_an_unknown_layout():
    with pytest.raises(ConfigError, match="layout=stacked: expected one of"):
        TrainStep(squared, adam(), Net(0), layout="stacked")

"""Trains on virtual devices and compares with one: `python on_devices.py`, with XLA_FLAGS set by the test."""

import json
import sys
from typing import Any

import jax
import numpy as np
import optax

from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep, data_parallel, fsdp
from fullstride.step.jax.checkpoint import Checkpoints
from tests.step.jax.nets import Net, adam, batch_of, run, squared


def _leaves(state):
    return [np.asarray(x, "d") for x in jax.tree.leaves(state.carry)]


def _compared(name, one, batches, keys, **settings):
    step = TrainStep(squared, adam(), Net(0, width=8), on_retrace="raise", **settings)
    state, losses = run(step, batches, keys)
    error = max(np.abs(a - b).max() for a, b in zip(_leaves(state), _leaves(one[0]), strict=True))
    spread = [not x.sharding.is_fully_replicated for x in state.buffers]
    held = sum(x.addressable_shards[0].data.nbytes for x in state.buffers) / sum(x.nbytes for x in state.buffers)
    report = step.compile(batches[0], keys[0])
    return name, {
        "error": float(error),
        "loss_error": float(np.abs(np.array(losses) - one[1]).max()),
        "divided": sum(spread),
        "held": held,
        "traces": step.traces,
        "devices": len(state.buffers[0].sharding.device_set),
        "collectives": sorted(c for c in ("all-reduce", "all-gather", "reduce-scatter") if c in report.hlo),
        "donated": report.aliased_bytes > 0,
    }


def main(folder):
    batches = [batch_of(i, 8) for i in range(3)]
    keys = list(jax.random.split(jax.random.key(0), 3))
    one = run(TrainStep(squared, adam(), Net(0, width=8)), batches, keys)
    found: dict[str, Any] = dict(
        [
            _compared("data grouped", one, batches, keys, sharding=data_parallel(), layout="grouped"),
            _compared("fsdp", one, batches, keys, sharding=fsdp(smallest=16)),
            _compared("fsdp grouped", one, batches, keys, sharding=fsdp(smallest=16), layout="grouped"),
        ]
    )
    # The second cannot be divided, the third is too small.
    found["rules"] = [list(fsdp(smallest=16).rule("w", shape)) for shape in [(3, 8), (5, 7), (4, 3)]]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    several = TrainStep(squared, optax.sgd(0.1), Net(0, width=8), sharding=fsdp(smallest=16), steps_per_call=3)
    state, _ = several(several.init(), stacked)
    single = run(TrainStep(squared, optax.sgd(0.1), Net(0, width=8)), batches)
    found["several"] = max(float(np.abs(a - b).max()) for a, b in zip(_leaves(state), _leaves(single[0]), strict=True))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
        alone = TrainStep(squared, optax.sgd(0.1), Net(1, width=8))
        moved, back = checkpoints.restore(alone)[0], checkpoints.restore(several)[0]
    found["moved"] = all(np.array_equal(a, b) for a, b in zip(_leaves(moved), _leaves(state), strict=True))
    found["back"] = [x.sharding == y.sharding for x, y in zip(back.buffers, state.buffers, strict=True)]
    try:
        several(state, jax.tree.map(lambda x: x[:, :7], stacked))
    except ConfigError as error:
        found["refused"] = str(error)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

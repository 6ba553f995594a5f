"""Decode steps whose layers are one chain, emulated, against the plain step."""

import jax
import numpy as np
import pytest

from fullstride.llm.bench_work import RandomParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda.layers import most_rows
from fullstride.llm.kernels.cuda.sets import chained
from fullstride.llm.models.decoder import hidden_states
from fullstride.llm.models.parameters import put
from tests.llm.kernels.emulation import seeded
from tests.llm.kernels.test_token import BLOCK, pool_of, rows_of

QWEN = ModelConfig("qwen3", 200, 256, 384, 2, 2, 1, 128, 512, tied=True, qk_norm=True)
LLAMA = ModelConfig("llama", 136, 192, 256, 2, 6, 2, 64, 512)
BIASED = ModelConfig("qwen2", 200, 128, 192, 1, 4, 2, 64, 512, qkv_bias=True)


def steps(config, lengths, kernels, dtype, seed=0):
    """What the last layer leaves, and the pool before and after."""
    parameters = RandomParameters(config, "bfloat16")
    batch = rows_of(config, lengths, 12)
    pool = pool_of(config, batch)
    made = {}
    for name, (chosen, kind) in {"exact": (None, "float32"), "plain": (None, dtype), "chained": (kernels, dtype)}.items():
        weights = put(config, parameters, kind, jax.devices()[0])
        from fullstride.llm.kernels.plain import plain

        with seeded(seed):
            run = jax.jit(hidden_states, static_argnums=(0, 1, 5))
            hidden, after = run(config, chosen or plain(dynamic=False), weights, pool.astype(kind), batch, BLOCK)
        made[name] = np.asarray(hidden, np.float32), np.asarray(after, np.float32)
    return made, np.asarray(pool, np.float32), np.asarray(batch.slots)


@pytest.mark.parametrize("config", [QWEN, LLAMA, BIASED], ids=["qwen3", "llama", "qwen2"])
def test_layers_and_keys_are_those_of_the_plain_step(config):
    lengths = [int(n) for n in np.random.default_rng().integers(0, 90, 38)]
    lengths[3] = lengths[17] = -1
    made, before, slots = steps(config, lengths, chained(config), "bfloat16", seed=int(config.hidden_size))
    live = np.asarray(lengths) >= 0
    exact, kept = made["exact"]
    error, allowed = (np.abs(made[x][0] - exact)[live].max() / np.abs(exact[live]).max() for x in ("chained", "plain"))
    assert error <= max(1.5 * allowed, 1e-3), (error, allowed)
    changed, own = made["chained"][1], slots[live]
    np.testing.assert_allclose(changed[:, :, own], kept[:, :, own], rtol=0.05, atol=0.05)
    changed[:, :, own] = before[:, :, own]
    np.testing.assert_array_equal(changed, before)


def test_what_cannot_be_divided_is_refused():
    assert most_rows(QWEN) == 128
    odd = QWEN._replace(hidden_size=200) if hasattr(QWEN, "_replace") else ModelConfig("qwen3", 200, 200, 384, 2, 2, 1, 128, 512, tied=True, qk_norm=True)
    assert most_rows(odd) == 0
    assert isinstance(chained(odd), str)

"""Decode steps whose layers are one chain, emulated, against the plain step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.llm.work import RandomParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda.layers import most_rows
from fullstride.llm.kernels.cuda.sets import made
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.decoder import hidden_states
from fullstride.llm.models.parameters import put
from tests.llm.kernels.emulation import seeded
from tests.llm.kernels.fp8_numbers import numbers, packed, restored
from tests.llm.kernels.test_token import BLOCK, pool_of, rows_of

QWEN = ModelConfig("qwen3", 200, 256, 384, 2, 2, 1, 128, 512, tied=True, qk_norm=True)
LLAMA = ModelConfig("llama", 136, 192, 256, 2, 6, 2, 64, 512)
BIASED = ModelConfig("qwen2", 200, 128, 192, 1, 4, 2, 64, 512, qkv_bias=True)

WIDE = replace(QWEN, head_dim=96, layers=1)


def step(config, kernels, parameters, dtype, pool, batch):
    """Return the last layer's output and the KV cache after it."""
    weights = put(config, parameters, dtype, jax.devices()[0])
    run = jax.jit(hidden_states, static_argnums=(0, 1, 5))
    pool = pool if pool.dtype == np.uint8 else pool.astype(dtype)
    return tuple(np.asarray(x, np.float32) for x in run(config, kernels, weights, jnp.asarray(pool), batch, BLOCK))


def check(config, lengths, width=12, seed=0, fp8=False):
    """Check that the step is as near to fp32 as the plain step in bf16 and writes the rows' keys and values only."""
    chosen = made("chained", config, None)
    assert not isinstance(chosen, str), chosen
    parameters, batch = RandomParameters(config, "bfloat16"), rows_of(config, lengths, width)
    pool = pool_of(config, batch)
    pool = packed(np.asarray(pool, np.float32), BLOCK) if fp8 else pool
    exact, kept = step(config, plain(dynamic=False), parameters, "float32", pool, batch)
    rounded, _ = step(config, plain(dynamic=False), parameters, "bfloat16", pool, batch)
    with seeded(seed):
        found, after = step(config, chosen, parameters, "bfloat16", pool, batch)
    live = np.asarray(lengths) >= 0
    ours, plains = ((x - exact)[live] for x in (found, rounded))
    # The largest of so many errors of either varies by itself: it was 0.5 to 1.7 x the other one. With codes each has
    # keys and values that fall on the other side of the middle between two.
    assert np.sqrt((ours**2).mean()) <= (2 if fp8 else 1.1) * np.sqrt((plains**2).mean())
    assert np.abs(ours).max() <= 3 * np.abs(plains).max() * (1 + fp8)
    own, before = np.asarray(batch.slots)[live], np.asarray(pool, np.float32)
    if fp8:
        found, wanted = (numbers(x.astype(np.uint8), own, BLOCK) for x in (after, kept))
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
        after = restored(after, before, own, BLOCK)
    else:
        np.testing.assert_allclose(after[:, :, own], kept[:, :, own], rtol=0.05, atol=0.05)
    after[:, :, own] = before[:, :, own]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("config", "rows"),
    [(QWEN, 38), (LLAMA, 71), (BIASED, 3), pytest.param(WIDE, 5, marks=pytest.mark.thorough)],
    ids=["qwen3", "llama", "qwen2", "heads of 96"],
)
def test_layers_and_keys_are_those_of_the_plain_step(config, rows):
    lengths = [int(n) for n in np.random.default_rng().integers(0, 90, rows)]
    lengths[rows // 2] = -1
    check(config, lengths, seed=rows)


@pytest.mark.thorough
def test_layers_with_an_fp8_cache():
    check(BIASED, [40, -1, 66], seed=2, fp8=True)


def test_what_cannot_be_divided_is_refused():
    assert most_rows(QWEN) == 128
    odd = replace(QWEN, hidden_size=200)
    assert most_rows(odd) == 0
    assert made("chained", odd, None) == "its projections cannot be divided among thread blocks"

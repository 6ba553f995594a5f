import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.engine.adapters import filled
from fullstride.llm.kernels.interface import StepBatch
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models import rope
from fullstride.llm.models.adapters import empty_slots
from fullstride.llm.models.decoder import hidden_states, logits
from fullstride.llm.models.parameters import put
from fullstride.llm.weights import load
from fullstride.llm.weights.peft_adapter import read_adapter
from tests.llm import tiny

BLOCK = 4
pytestmark = pytest.mark.usefixtures("compiled_soon")
# Largest difference over the largest logit, in fp32. Some of these random models and texts take rounding up to it: then
# transformers' own distance from fp64 is the measure, which adds in another order.
ERROR, OWN = 2e-5, 4.0


def all_logits(loaded, ids: list[int], adapter: Path | None = None, dtype: str = "float32") -> list[np.ndarray]:
    """Return the logits of every position, computed by both kinds of attention; an adapter is in slot 1 of 2.

    First the whole prompt is one row's single tile, then each token is a row of its own, over the keys of the tile.
    """
    config, count = loaded.config, len(ids)
    weights = put(config, loaded.parameters, dtype, jax.devices()[0])
    if adapter is not None:
        read = read_adapter(adapter, config)
        slots = zip(weights.layers, empty_slots(config, 2, read.rank, dtype, jax.devices()[0]), strict=True)
        weights = weights._replace(layers=tuple(layer._replace(adapters=own) for layer, own in slots))
        weights = filled(config, weights, 1, read, read.rank)
    table = 1 + np.random.default_rng(0).permutation(-(-count // BLOCK))
    positions = jnp.arange(count, dtype=jnp.int32)
    slots = jnp.asarray(table[np.arange(count) // BLOCK] * BLOCK + np.arange(count) % BLOCK, jnp.int32)
    one, angles = jnp.asarray(table[None], jnp.int32), rope.step_angles(config, positions)
    batch = StepBatch(jnp.asarray(ids, jnp.int32), positions, slots, one[:0], one, *angles)
    pool = jnp.zeros((config.layers, 2, (len(table) + 1) * BLOCK, config.kv_heads, config.head_dim), dtype)
    found = []
    for own in (batch, batch._replace(rows=jnp.repeat(one, count, 0), tiles=one[:0])):
        kernels, groups = plain(dynamic=own is not batch), len(own.rows) + len(own.tiles)
        own = own._replace(adapters=None if adapter is None else jnp.ones(groups, jnp.int32))
        hidden, pool = hidden_states(config, kernels, weights, pool, own, BLOCK)
        found.append(np.asarray(logits(config, kernels, weights, hidden)))
    return found


def require_transformers_logits(
    folder: Path,
    count: int,
    adapter: Path | None = None,
    merged: Callable[[Any], Any] = lambda model: model,
    bfloat16: bool = False,
) -> None:
    """Compare the logits of that many random tokens with transformers', by fp64; `merged` adds an adapter there.

    Of a model saved in bfloat16 those in bfloat16 are compared, too: they must be as close as transformers' own.
    """
    ids, loaded = np.random.default_rng().integers(3, 320, count).tolist(), load(folder)

    def theirs(dtype: torch.dtype) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        ).eval()
        with torch.no_grad():
            return merged(model).to(dtype)(torch.tensor([ids])).logits[0].double().numpy()

    expected, single = theirs(torch.float64), theirs(torch.float32)
    own = np.abs(single - expected).max() / np.abs(expected).max()
    assert own < 2 * ERROR
    for found in all_logits(loaded, ids, adapter):
        assert np.abs(found - expected).max() / np.abs(expected).max() < max(ERROR, OWN * own)
    if bfloat16:
        # A router's tie that is rounded the other way gives a token another expert; most tokens have no tie.
        off = lambda found: np.median(np.linalg.norm(found - expected, axis=-1))  # noqa: E731
        rounded = off(theirs(torch.bfloat16))
        for found in all_logits(loaded, ids, dtype="bfloat16"):
            assert off(found) < 1.5 * rounded < 0.5 * off(0)


@pytest.mark.parametrize("kind", ["tiny_qwen3", "tiny_llama", "tiny_qwen2"])
def test_logits_are_those_of_transformers(request, kind):
    require_transformers_logits(request.getfixturevalue(kind), 130)


LONGER = {
    "linear": tiny.LINEAR,
    "yarn": tiny.YARN,
    "yarn as DeepSeek has it": tiny.YARN["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 5.0},
    "yarn, in parts of pairs": tiny.YARN["rope_parameters"]
    | {"truncate": False, "attention_factor": 1.3, "beta_slow": 2},
    "yarn without a ramp": tiny.YARN["rope_parameters"] | {"rope_theta": 2.0, "original_max_position_embeddings": 2000},
}


# Every way with one family, and every family: they read it alike.
KINDS = ("llama", "qwen2", "qwen3")
ALWAYS = {(KINDS[i % 3], name) for i, name in enumerate(LONGER)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.thorough)
        for each in itertools.product(KINDS, LONGER)
    ],
)
def test_logits_of_models_for_longer_sequences(tiny_model, kind, name):
    settings = LONGER[name] if "rope_parameters" in LONGER[name] else {"rope_parameters": LONGER[name]}
    folder = tiny_model(kind, **settings)
    require_transformers_logits(folder, 300)
    assert load(folder).config.max_position > 300


def test_a_missing_or_misshapen_parameter_is_named(tiny_qwen3):
    loaded = load(tiny_qwen3)
    parameters = dict(loaded.parameters)
    parameters["layers.1.k"] = parameters["layers.1.k"][:-1]
    with pytest.raises(ConfigError, match=r"layers\.1\.k has the shape"):
        put(loaded.config, parameters, "float32", jax.devices()[0])
    del parameters["layers.0.down"]
    with pytest.raises(ConfigError, match=r"layers\.0\.down is missing"):
        put(loaded.config, parameters, "float32", jax.devices()[0])


def test_values_that_float16_cannot_hold(tiny_llama):
    """Parameters opened in another dtype than the engine's are checked, too."""
    loaded = load(tiny_llama)
    parameters = dict(loaded.parameters) | {"layers.1.k": 1e6 * loaded.parameters["layers.1.k"]}
    with pytest.raises(ConfigError, match=r"layers\.1\.k has values that float16 cannot hold"):
        put(loaded.config, parameters, "float16", jax.devices()[0])
    put(loaded.config, parameters, "bfloat16", jax.devices()[0])


def test_parameters_are_fused_and_of_the_dtype_asked_for(tiny_qwen2):
    loaded = load(tiny_qwen2)
    weights = put(loaded.config, loaded.parameters, "bfloat16", jax.devices()[0])
    layer, parts = weights.layers[1], [loaded.parameters[f"layers.1.{name}"] for name in ("q", "k", "v")]
    np.testing.assert_array_equal(layer.qkv, np.concatenate(parts).astype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert layer.qkv_bias is not None
    assert layer.q_norm is None

import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.llm.kernels.emulation as emulation
from benchmarks.cases.llm.work import RandomParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda import token
from fullstride.llm.kernels.interface import StepBatch
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models import rope
from fullstride.llm.models.decoder import hidden_states, logits
from fullstride.llm.models.parameters import put

BLOCK = 8
QWEN = ModelConfig("qwen3", 200, 256, 512, 2, 2, 1, 128, 512, tied=True, qk_norm=True)
LLAMA = ModelConfig("llama", 136, 512, 256, 2, 8, 2, 64, 512)
BIASED = ModelConfig("qwen2", 200, 256, 768, 1, 12, 2, 64, 512, qkv_bias=True)
ALONE = ModelConfig("qwen3", 72, 256, 256, 2, 2, 2, 128, 512, qk_norm=True)


def rows_of(config, lengths, width):
    """Decode rows whose sequences have that many tokens with keys, scattered over the pool; -1 is padding."""
    draw = np.random.default_rng()
    blocks = 1 + draw.permutation(width * len(lengths)).reshape(len(lengths), width)
    positions = np.asarray(lengths, np.int32)
    inside = np.maximum(positions, 0)
    slots = np.where(positions < 0, 0, blocks[np.arange(len(lengths)), inside // BLOCK] * BLOCK + inside % BLOCK)
    angles = rope.angles(jnp.asarray(positions), rope.frequencies(config))
    tokens = draw.integers(0, config.vocab_size, len(lengths))
    none = np.zeros((0, width))
    ints = [jnp.asarray(x, jnp.int32) for x in (tokens, positions, slots, blocks, none)]
    return StepBatch(*ints, *angles)  # pyright: ignore[reportCallIssue]


def pool_of(config, batch):
    """Keys and values of what the rows have; NaN everywhere else."""
    draw = np.random.default_rng()
    count = (int(np.asarray(batch.rows).max()) + 1) * BLOCK
    pool = np.full((config.layers, 2, count, config.kv_heads, config.head_dim), np.nan, np.float32)
    for table, length in zip(np.asarray(batch.rows), np.asarray(batch.positions), strict=True):
        for at in range(max(0, length)):
            pool[:, :, table[at // BLOCK] * BLOCK + at % BLOCK] = draw.standard_normal(pool.shape[:2] + pool.shape[3:])
    return jnp.asarray(pool, jnp.bfloat16)


def reference(config, weights, batch, pool):
    """The plain step."""
    kernels = plain(dynamic=False)
    hidden, pool = hidden_states(config, kernels, weights, pool.astype(weights.embed.dtype), batch, BLOCK)
    return np.asarray(logits(config, kernels, weights, hidden)), np.asarray(pool, np.float32)


def check(config, lengths, blocks, width=24, steps=1, seed=0, again=0):
    """Steps of rows with that many tokens against the plain ones, and as often `again` as asked for."""
    parameters = RandomParameters(config, "bfloat16")
    exact_weights, weights = (put(config, parameters, dtype, jax.devices()[0]) for dtype in ("float32", "bfloat16"))
    packed, scratch = token.pack_all(config, weights), token.fresh_scratch(config, token.padded(len(lengths)), blocks)
    draw = np.random.default_rng()
    for step in range(steps):
        if step:
            lengths = [n if n < 0 else int(draw.integers(0, width * BLOCK - 1)) for n in lengths]
        batch = rows_of(config, lengths, width)
        pool = pool_of(config, batch)
        exact, kept = reference(config, exact_weights, batch, pool)
        rounded, _ = reference(config, weights, batch, pool)
        with emulation.seeded(seed + step):
            run = jax.jit(partial(token.logits, config, block=BLOCK, blocks=blocks))
            found, after, scratch = run(packed, weights.embed, pool, scratch, batch)
        live = np.asarray(lengths) >= 0
        error, allowed = (np.abs(x - exact)[live].max() / np.abs(exact[live]).max() for x in (found, rounded))
        assert error <= max(1.5 * allowed, 1e-3), (error, allowed)
        own = np.asarray(batch.slots)[live]
        changed, before = np.asarray(after, np.float32), np.asarray(pool, np.float32)
        np.testing.assert_allclose(changed[:, :, own], kept[:, :, own], rtol=0.05, atol=0.05)
        changed[:, :, own] = before[:, :, own]
        np.testing.assert_array_equal(changed, before)
        for _ in range(again):
            same, after, scratch = run(packed, weights.embed, after, scratch, batch)
            np.testing.assert_array_equal(same[live], found[live])


@pytest.mark.parametrize(
    "config",
    [QWEN, pytest.param(LLAMA, marks=pytest.mark.thorough), BIASED, ALONE],
    ids=["qwen3", "llama", "qwen2", "one head each"],
)
def test_logits_and_keys_are_those_of_the_plain_step(config):
    check(config, [37, -1, 0, 130], 9)


@pytest.mark.parametrize("rows", [1, 11, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 8, 16))])
def test_any_number_of_rows(rows):
    check(QWEN, [int(n) for n in np.random.default_rng().integers(0, 40, rows)], 8)


def test_steps_follow_one_another_as_contexts_come_and_go():
    check(QWEN, [180, 3], 8, steps=3, seed=5)


# The parts of a block's shared memory and the words between blocks, by the source's own constants.
CONSTANTS = {
    "sums": "2 * SUMS_FLOATS",
    "heads": "HEAD_WORDS",
    "squares": "2 * SQUARES_FLOATS",
    "mix": "MIX_FLOATS",
    "angles": "ANGLE_FLOATS",
    "norms": "NORM_FLOATS",
    "residual": "RESIDUAL_FLOATS",
    "table": "TABLE_WORDS",
    "scratch": "HEADER_WORDS + 2 * SET_WORDS",
    "slot": "SLOT",
}


@pytest.mark.parametrize(("config", "rows", "blocks"), [(QWEN, 3, 132), (LLAMA, 16, 7), (BIASED, 8, 20)])
def test_sizes_of_memory_are_those_of_the_source(config, rows, blocks, tmp_path):
    sizes = token.TokenSizes(rows, BLOCK, 640, blocks)
    made = token.kernel(config, sizes)
    shown = "".join(f'std::printf("{name} %d\\n", int({value}));' for name, value in CONSTANTS.items())
    headers = [(emulation.HERE / name).read_text() for name in ("fibers.h", "device_on_host.h")]
    text = "\n".join(["#include <cstdio>", *headers, made.body, f"int main() {{ {shown} }}"])
    (tmp_path / "sizes.cpp").write_text(text)
    command = ["g++", "-std=c++17", "-O0", "-w", str(tmp_path / "sizes.cpp"), "-o", str(tmp_path / "sizes")]
    subprocess.run(command, check=True, capture_output=True)
    lines = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {name: int(value) for name, value in map(str.split, lines)}
    words, slot = token.shared_words(config, sizes), found.pop("slot") + token.BARRIERS
    assert found.pop("scratch") == token.scratch_words(config, rows, blocks)
    # Last is the layer's number, a word that 16 bytes are kept for.
    assert [*found, "layer"] == [*words]
    assert found == {name: words[name] for name in found}
    assert made.shared == dict(made.defines)["RING"] * slot + 4 * sum(words.values()) <= token.SHARED

"""A KV cache of e4m3 codes with scales: its layout, and the plain set's attention over it."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import special

from fullstride.llm.kernels.fp8_pool import numbers, quantize, token_blocks, whole_blocks
from fullstride.llm.kernels.interface import FP8_POOL
from fullstride.llm.kernels.xla.attention import attention
from tests.llm.kernels import fp8_numbers
from tests.llm.kernels.xla.test_attention import BLOCK, HEADS, KV, SHAPE, WIDTH, Case


def test_an_array_has_room_for_the_scales_and_no_more():
    for head_dim in (2, 16, 64, 96, 128, 256):
        for blocks in range(1, 400):
            whole = whole_blocks(blocks, FP8_POOL, head_dim)
            assert 0 <= (whole - blocks) * head_dim - 2 * blocks < head_dim
            assert token_blocks(whole, FP8_POOL, head_dim) == blocks
            # Of memory for so many whole blocks as many are for tokens as possible.
            found = token_blocks(blocks, FP8_POOL, head_dim)
            assert whole_blocks(found, FP8_POOL, head_dim) <= blocks < whole_blocks(found + 1, FP8_POOL, head_dim)
    assert whole_blocks(7, "bfloat16", 64) == token_blocks(7, "bfloat16", 64) == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_as_near_as_codes_are(dtype):
    """Heads of any size, with outliers, zeros, and more than the largest scale holds."""
    rng = np.random.default_rng()
    x = rng.standard_normal((7, 40, 64)) * np.reshape([1e-25, 1e-4, 0.01, 1, 30, 1e4, 1e20], (7, 1, 1))
    x[1, :, 3] *= 50
    x[0, 0], x[2, 0, 1:], x[4, 3, 5] = 0, 0, -0.0
    x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    codes, stored = jax.jit(quantize)(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(stored, np.float64), fp8_numbers.scales_of(x) * 2.0**120)
    back = np.asarray(jax.jit(partial(numbers, dtype=jnp.dtype(dtype)))(codes, stored), np.float64)
    exact = x.astype(np.float64)
    np.testing.assert_array_equal(back, fp8_numbers.rounded(x).astype(dtype))
    assert (np.abs(back[-1]) == np.asarray(448 * 255, dtype)).mean() > 0.99
    # Three bits of mantissa and a scale's rounding; of the smallest numbers steps of the scale times 2^-9.
    step = np.abs(exact[:-1]).max(-1, keepdims=True) / 448
    assert (np.abs(back - exact)[:-1] <= np.maximum(np.abs(exact[:-1]) / 15, step * 2.0**-9)).all()


def test_what_is_no_number_stays_none():
    x = jnp.ones((3, 16)).at[0, 5].set(jnp.nan).at[1, 6].set(jnp.inf)
    back = np.asarray(numbers(*quantize(x), jnp.dtype("float32")))
    assert np.isnan(back[0, 5])
    assert back[1, 6] == 448 * 255
    assert np.abs(back[2] - 1).max() < 0.005


class Fp8Case(Case):
    """Case with an fp8 KV cache; its tokens have keys and values of very different sizes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pool = self.pool * self.sizes(self.pool.shape[2])[:, None, None]
        self.codes = fp8_numbers.packed(self.pool, BLOCK)
        self.qkv = (self.qkv.reshape(len(self.qkv), -1, WIDTH) * self.sizes(len(self.qkv))[:, None, None]).astype(
            np.float32
        )
        self.qkv[:, :HEADS] = self.rng.standard_normal((len(self.qkv), HEADS, WIDTH))
        self.qkv = self.qkv.reshape(len(self.qkv), -1)

    def sizes(self, count: int) -> np.ndarray:
        return self.rng.choice([1e-4, 1, 3000], count)

    def fresh(self) -> tuple[np.ndarray, np.ndarray]:
        """The batch's keys and values before they are rounded, and its queries, in fp64."""
        parts = self.qkv.reshape(-1, HEADS + 2 * KV, WIDTH).astype(np.float64)
        q, k, v = np.split(parts, (HEADS, HEADS + KV), 1)
        live = self.positions >= 0
        return np.stack([self.turned(k, self.norms.k), v])[:, live], self.turned(q, self.norms.q)

    def attended(self, q: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """Token by token, from one layer of a pool that has the batch's own keys and values."""
        out = np.zeros_like(q)
        for i in np.flatnonzero(self.positions >= 0):
            seen = np.array([self.slot(self.tables[i], p) for p in range(self.positions[i] + 1)])
            keys, values = fp8_numbers.numbers(pool, seen, BLOCK)[1]
            for head in range(HEADS):
                own = head // (HEADS // KV)
                out[i, head] = special.softmax(keys[:, own] @ q[i, head] * SHAPE.scale) @ values[:, own]
        return out.reshape(len(out), -1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("contexts", "tiles"), [([0, 5, 300], [(0, 7), (261, 3), (1, 1)]), ([17, -1], [])])
def test_each_token_sees_its_own_past_rounded(dynamic, contexts, tiles):
    case = Fp8Case(np.random.default_rng(), contexts, tiles, 7)
    run = jax.jit(partial(attention, shape=SHAPE, dynamic=dynamic))
    out, after = run(jnp.asarray(case.qkv), jnp.asarray(case.codes), jnp.int32(1), case.batch(), case.norms)
    after, slots = np.array(after), case.slots[case.positions >= 0]
    wanted, q = case.fresh()
    written = fp8_numbers.numbers(after, slots, BLOCK)[1]
    # fp32 and fp64 may fall on either side of the middle between two codes; each is half a step away at most.
    step = np.abs(wanted).max(-1, keepdims=True) / 448
    assert (np.abs(written - wanted) <= np.maximum(np.abs(wanted) / 15, step * 2.0**-9)).all()
    expected = case.attended(q, after)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-3)
    # Padding writes to block 0 and nowhere else.
    kept = fp8_numbers.restored(after, case.codes, np.unique([*slots, *range(BLOCK)]), BLOCK)
    np.testing.assert_array_equal(kept, case.codes)

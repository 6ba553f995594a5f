"""A pool of e4m3 codes: the plain set's attention, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import special

from fullstride.llm.kernels.interface import FP8_POOL
from fullstride.llm.kernels.xla.attention import MOST, attention, from_cache_dtype, to_cache_dtype
from tests.llm.kernels.xla.test_attention import BLOCK, HEADS, KV, SHAPE, WIDTH, Case

E4M3 = ml_dtypes.float8_e4m3fn


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3 numbers, as NumPy's own conversion finds them where there are any."""
    return np.clip(x, -MOST, MOST).astype(E4M3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_conversion_is_the_nearest_and_ends_at_the_largest(dtype):
    rng = np.random.default_rng()
    x = np.concatenate([rng.standard_normal(999) * scale for scale in (1e-4, 0.01, 1, 30, 400, 1e20)])
    x = np.concatenate([x, [0, -0.0, 448, 464, 465, -1e9, np.inf, -np.inf, 2**-9, 2**-10, 3 * 2**-10]]).astype(dtype)
    codes = np.asarray(jax.jit(partial(to_cache_dtype, dtype=jnp.dtype(FP8_POOL)))(jnp.asarray(x)))
    np.testing.assert_array_equal(codes, rounded(x.astype(np.float32)).view(np.uint8))
    back = np.asarray(from_cache_dtype(jnp.asarray(codes), jnp.dtype(dtype)), np.float64)
    assert np.isfinite(back).all()
    np.testing.assert_array_equal(back, codes.view(E4M3).astype(np.float64))
    small = np.abs(x.astype(np.float64)) <= MOST
    # Three bits of mantissa; steps of 2^-9 below 2^-6.
    exact = x.astype(np.float64)[small]
    assert (np.abs(back[small] - exact) <= np.maximum(np.abs(exact) / 16, 2.0**-10)).all()


class Fp8Case(Case):
    """Case with an fp8 KV cache; its keys and values, and the batch's, exceed the range of e4m3."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pool = rounded(self.pool * 2)
        self.qkv = self.qkv * self.rng.choice([1, 30], (len(self.qkv), 1)).astype(np.float32)

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
            seen = [self.slot(self.tables[i], p) for p in range(self.positions[i] + 1)]
            for head in range(HEADS):
                keys, values = pool[:, seen, head // (HEADS // KV)]
                out[i, head] = special.softmax(keys @ q[i, head] * SHAPE.scale) @ values
        return out.reshape(len(out), -1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("contexts", "tiles"), [([0, 5, 300], [(0, 7), (261, 3), (1, 1)]), ([17, -1], [])])
def test_each_token_sees_its_own_past_rounded(dynamic, contexts, tiles):
    case = Fp8Case(np.random.default_rng(), contexts, tiles, 7)
    run = jax.jit(partial(attention, shape=SHAPE, dynamic=dynamic))
    pool = jnp.asarray(case.pool.view(np.uint8))
    out, after = run(jnp.asarray(case.qkv), pool, jnp.int32(1), case.batch(), case.norms)
    after, slots = np.array(after), case.slots[case.positions >= 0]
    wanted, q = case.fresh()
    written = after[1][:, slots].view(E4M3).astype(np.float64)
    # fp32 and fp64 may fall on either side of the middle between two codes; each is half a step away at most.
    stopped = np.clip(wanted, -MOST, MOST)
    assert (np.abs(written - stopped) <= np.maximum(np.abs(stopped) / 16, 2.0**-10) * 1.001 + 1e-6).all()
    np.testing.assert_allclose(out, case.attended(q, after[1].view(E4M3).astype(np.float64)), atol=3e-4, rtol=1e-4)
    # Padding writes to block 0 and nowhere else.
    after[1][:, slots] = case.pool.view(np.uint8)[1][:, slots]
    np.testing.assert_array_equal(after[:, :, BLOCK:], case.pool.view(np.uint8)[:, :, BLOCK:])

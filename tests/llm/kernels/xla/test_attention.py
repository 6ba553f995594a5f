from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy import special

from fullstride.llm.kernels.interface import AttentionShape, QKNorm, StepBatch
from fullstride.llm.kernels.xla.attention import attention

LAYERS, BLOCK, KV, WIDTH, HEADS = 3, 4, 2, 8, 6
BLOCKS = 500
SHAPE = AttentionShape(HEADS, KV, WIDTH, BLOCK, 0.3, 1e-6)


class Case:
    """Rows with contexts of their own, and tiles; past keys and values lie all over the pool."""

    def __init__(self, rng: np.random.Generator, contexts: list[int], tiles: list[tuple[int, int]], tile: int):
        self.rng, self.tile = rng, tile
        self.pool = rng.standard_normal((LAYERS, 2, BLOCKS * BLOCK, KV, WIDTH)).astype(np.float32)
        free = iter(rng.permutation(np.arange(1, BLOCKS)))
        longest = max([*contexts, *(start + count for start, count in tiles)])
        width = -(-(longest + 1) // BLOCK)
        self.rows, self.tiles = (
            np.array([[next(free) for _ in range(width)] for _ in range(n)]).reshape(n, width)
            for n in (len(contexts), len(tiles))
        )
        # What nobody sees may hold anything.
        ends = [*contexts, *(start + count for start, count in tiles)]
        seen = [self.slot(t, p) for t, end in zip([*self.rows, *self.tiles], ends, strict=True) for p in range(end)]
        self.pool[:, :, np.setdiff1d(np.arange(BLOCKS * BLOCK), seen)] = np.nan
        starts = np.array([[start + i if i < count else -1 for i in range(tile)] for start, count in tiles])
        self.positions = np.concatenate([contexts, starts.reshape(-1)]).astype(int)
        tables = [*self.rows, *(table for table in self.tiles for _ in range(tile))]
        self.tables = np.array(tables)
        self.slots = np.array([self.slot(t, p) if p >= 0 else 0 for t, p in zip(tables, self.positions, strict=True)])
        self.qkv = rng.standard_normal((len(tables), (HEADS + 2 * KV) * WIDTH)).astype(np.float32)
        self.norms = QKNorm(*(jnp.asarray(rng.uniform(0.5, 1.5, WIDTH), jnp.float32) for _ in range(2)))
        angle = rng.uniform(0, 6, (len(tables), WIDTH // 2))
        self.cos, self.sin = np.cos(angle), np.sin(angle)

    @staticmethod
    def slot(table: np.ndarray, position: int) -> int:
        return int(table[position // BLOCK]) * BLOCK + position % BLOCK

    def batch(self) -> StepBatch:
        integers = (self.positions, self.positions, self.slots, self.rows, self.tiles)
        tokens, positions, slots, rows, tiles = (jnp.asarray(x, jnp.int32) for x in integers)
        cos, sin = (jnp.asarray(x, jnp.float32) for x in (self.cos, self.sin))
        return StepBatch(tokens, positions, slots, rows, tiles, cos, sin)

    def expected(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Token by token, in fp64."""
        q, k, v = np.split(self.qkv.reshape(-1, HEADS + 2 * KV, WIDTH).astype(np.float64), (HEADS, HEADS + KV), 1)
        q, k = self.turned(q, self.norms.q), self.turned(k, self.norms.k)
        pool = self.pool.astype(np.float64)
        for i in np.flatnonzero(self.positions >= 0):
            pool[layer, 0, self.slots[i]], pool[layer, 1, self.slots[i]] = k[i], v[i]
        out = np.zeros_like(q)
        for i in np.flatnonzero(self.positions >= 0):
            seen = [self.slot(self.tables[i], p) for p in range(self.positions[i] + 1)]
            for head in range(HEADS):
                keys, values = pool[layer, :, seen, head // (HEADS // KV)].transpose(1, 0, 2)
                out[i, head] = special.softmax(keys @ q[i, head] * SHAPE.scale) @ values
        return out.reshape(len(out), -1), pool

    def turned(self, x: np.ndarray, weight) -> np.ndarray:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + SHAPE.eps) * np.asarray(weight, np.float64)
        a, b = np.split(x, 2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(case: Case, layer: int, norms: QKNorm | None, dynamic: bool) -> tuple[Array, Array]:
    """One program, as in a step."""
    run = jax.jit(partial(attention, shape=SHAPE, dynamic=dynamic))
    return run(jnp.asarray(case.qkv), jnp.asarray(case.pool), jnp.int32(layer), case.batch(), norms)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("contexts", "tiles"), [([0, 5, 300], [(0, 7), (261, 3), (1, 1)]), ([17, -1], []), ([], [(3, 5)]), ([-1], [(0, 2)])]
)
def test_each_token_sees_its_own_past(dynamic, contexts, tiles):
    case = Case(np.random.default_rng(), contexts, tiles, 7)
    out, pool = attend(case, 1, case.norms, dynamic)
    expected, written = case.expected(1)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    # Padding writes to block 0 and nowhere else.
    np.testing.assert_allclose(pool[:, :, BLOCK:], written[:, :, BLOCK:], atol=1e-6)
    assert not np.array_equal(written[1], case.pool[1])


def test_a_wider_table_changes_nothing():
    case = Case(np.random.default_rng(), [40, 3], [(20, 5)], 7)
    narrow, _ = attend(case, 0, None, dynamic=False)
    case.rows, case.tiles = (np.pad(x, ((0, 0), (0, 140))) for x in (case.rows, case.tiles))
    for dynamic in (False, True):
        wide, _ = attend(case, 0, None, dynamic)
        np.testing.assert_allclose(wide, narrow, atol=1e-6)

"""The paged attention kernels, emulated, against fp64 token by token."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import special

from fullstride.llm.kernels.cuda.attention import attention, form, refusal
from fullstride.llm.kernels.cuda.launch import Kernel
from fullstride.llm.kernels.cuda.target import HOPPER, Target, capability_of, target_of
from fullstride.llm.kernels.interface import AttentionShape, QKNorm, StepBatch
from tests.llm.kernels.emulation import run as run_kernel
from tests.llm.kernels.emulation import seeded
from tests.llm.kernels.fp8_numbers import E4M3, numbers, packed, restored, rounded

LAYERS = 2
# What an A100 lacks, and the shared memory of the smallest GPUs.
AMPERE = Target(86, "80", clusters=False, shared=99 << 10)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def e4m3(x: np.ndarray) -> np.ndarray:
    """What is kept of heads: bf16 of codes times scales."""
    return bf16(rounded(x)).astype(np.float64)


class Case:
    """Rows and tiles with contexts of their own in a pool that is NaN where nobody sees it."""

    def __init__(
        self,
        shape: AttentionShape,
        contexts: list[int],
        tiles: list[tuple[int, int]],
        tile: int,
        seed: int | None = None,
        kept: Callable[[np.ndarray], np.ndarray] = bf16,
        sinks: bool = False,
        target: Target = HOPPER,
    ):
        self.shape, self.kept = shape, kept
        self.target, rng = target, np.random.default_rng(seed)
        self.sinks = jnp.asarray(bf16(rng.uniform(-1, 3, shape.heads))) if sinks else None
        width = max([*contexts, *(start + count for start, count in tiles)]) // shape.block + 1
        count = len(contexts) + len(tiles)
        tables = 1 + rng.permutation(count * width + 3)[: count * width].reshape(count, width)
        self.rows, self.tiles = tables[: len(contexts)], tables[len(contexts) :]
        starts = [[start + i if i < count else -1 for i in range(tile)] for start, count in tiles]
        self.positions = np.concatenate([contexts, np.reshape(starts, -1)]).astype(int)
        self.tables = np.array([*self.rows, *(table for table in self.tiles for _ in range(tile))])
        self.slots = np.array(
            [self.slot(t, p) if p >= 0 else 0 for t, p in zip(self.tables, self.positions, strict=True)]
        )
        slots = (count * width + 4) * shape.block
        self.pool = rng.standard_normal((LAYERS, 2, slots, shape.kv_heads, shape.head_dim))
        ends = [*contexts, *(start for start, _ in tiles)]
        seen = [self.slot(t, p) for t, end in zip(tables, ends, strict=True) for p in range(self.first(end), end)]
        self.pool[:, :, np.setdiff1d(np.arange(slots), seen)] = np.nan
        self.hold(self.pool)
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = bf16(rng.standard_normal((len(self.tables), wide)))
        self.weights = bf16(rng.uniform(0.5, 1.5, (2, shape.head_dim)))
        angle = rng.uniform(0, 6, (len(self.tables), shape.head_dim // 2))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def hold(self, x: np.ndarray) -> None:
        """Make these numbers, NaN where nobody sees them, the KV cache."""
        with np.errstate(invalid="ignore"):
            self.numbers = self.kept(x)
        self.pool = packed(x, self.shape.block) if self.kept is e4m3 else self.numbers

    def held(self, pool: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What slots of a KV cache hold, in fp64."""
        found = numbers(pool, slots, self.shape.block) if self.kept is e4m3 else pool[:, :, slots]
        return found.astype(np.float64)

    def first(self, position: int) -> int:
        """The first position that a token sees."""
        return max(0, position - self.shape.window + 1) if self.shape.window else 0

    def slot(self, table: np.ndarray, position: int) -> int:
        return int(table[position // self.shape.block]) * self.shape.block + position % self.shape.block

    def run(self, norms: bool, layer: int = 1, pick: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute attention for all rows and tiles, or for the rows in `pick` alone."""
        every = np.arange(len(self.tables)) if pick is None else np.array(pick)
        rows, tiles = (self.rows, self.tiles) if pick is None else (self.rows[pick], self.tiles[:0])
        integers = (self.positions[every], self.positions[every], self.slots[every], rows, tiles)
        batch = StepBatch(*(jnp.asarray(x, jnp.int32) for x in integers), self.cos[every], self.sin[every])  # pyright: ignore
        step = jax.jit(partial(attention, shape=self.shape, sinks=self.sinks, target=self.target))
        weights = QKNorm(*map(jnp.asarray, self.weights)) if norms else None
        out, pool = step(jnp.asarray(self.qkv[every]), jnp.asarray(self.pool), jnp.int32(layer), batch, weights)
        return np.asarray(out), np.array(pool)

    def expected(self, norms: bool, layer: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """In fp64, from keys as the KV cache has them; and the numbers in it."""
        shape = self.shape
        parts = self.qkv.reshape(len(self.qkv), -1, shape.head_dim)
        q, k, v = np.split(parts, (shape.heads, shape.heads + shape.kv_heads), 1)
        q, k = (self.turned(x, w, norms) for x, w in zip((q, k), self.weights, strict=True))
        pool = self.numbers.copy()
        for i in np.flatnonzero(self.positions >= 0):
            pool[layer, 0, self.slots[i]], pool[layer, 1, self.slots[i]] = self.kept(k[i]), self.kept(v[i])
        out = np.zeros(q.shape)
        for i in np.flatnonzero(self.positions >= 0):
            seen = [
                self.slot(self.tables[i], p) for p in range(self.first(int(self.positions[i])), self.positions[i] + 1)
            ]
            keys, values = pool[layer][:, seen].astype(np.float64)
            keys, values = (x.repeat(shape.heads // shape.kv_heads, 1) for x in (keys, values))
            scores = np.einsum("shd,hd->hs", keys, q[i].astype(np.float64)) * shape.scale
            scores = shape.cap * np.tanh(scores / shape.cap) if shape.cap else scores
            if self.sinks is not None:
                scores = np.concatenate([scores, np.asarray(self.sinks, np.float64)[:, None]], -1)
            out[i] = np.einsum("hs,shd->hd", special.softmax(scores, -1)[:, : len(seen)], values)
        return out.reshape(len(out), -1), pool

    def turned(self, x: np.ndarray, weight: np.ndarray, norms: bool) -> np.ndarray:
        wide = x.astype(np.float32)
        if norms:
            wide = bf16(wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + self.shape.eps)) * weight
        a, b = np.split(wide.astype(np.float32), 2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return bf16(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))


def check(case: Case, norms: bool) -> None:
    out, pool = case.run(norms)
    expected, written = case.expected(norms)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=0.02, rtol=0.02)
    # Keys may be rounded otherwise in their last bit; everything else stays as it was.
    fresh = case.slots[case.positions >= 0]
    # e4m3's are an eighth apart, and are made from what may be off as in bf16: a turned key is a difference of two. Of
    # one whose largest element is, all are.
    rtol, atol = (0.13 if case.kept is e4m3 else 0.01), 0.01
    found, wanted = case.held(pool, fresh)[1], written[1][:, fresh].astype(np.float64)
    np.testing.assert_allclose(bf16(found).astype(np.float64), wanted, rtol=rtol, atol=atol)
    assert (bf16(found) == bf16(wanted)).mean() > (0.9 if case.kept is e4m3 else 0.98)
    pool = restored(pool, case.pool, fresh, case.shape.block) if case.kept is e4m3 else pool
    pool[:, :, fresh] = case.pool[:, :, fresh]
    np.testing.assert_array_equal(pool.view(np.uint8), case.pool.view(np.uint8))


@pytest.mark.parametrize("kept", [bf16, e4m3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block", "norms"),
    [(4, 2, 128, 16, True), (7, 1, 64, 8, False), (3, 3, 64, 32, True), (12, 1, 128, 24, True)],
)  # fmt: skip
def test_rows_and_tiles(heads, kv_heads, head_dim, block, norms, kept):
    shape = AttentionShape(heads, kv_heads, head_dim, block, head_dim**-0.5, 1e-6)
    case = Case(shape, [0, 45, -1, 16, 301], [(0, 7), (61, 3), (130, 8)], 8, kept=kept)
    with seeded(5):
        check(case, norms)


@pytest.mark.thorough
@pytest.mark.parametrize(("head_dim", "kept"), [(64, bf16), (128, e4m3)])
def test_parts_left_in_memory(head_dim, kept):
    """Without clusters: of eight blocks those that the length takes, whose sums a second kernel adds up."""
    case = Case(AttentionShape(2, 1, head_dim, 8, 0.1, 1e-6), [0, 45, -1, 600], [], 8, kept=kept, target=AMPERE)
    with seeded(3):
        check(case, True)
    alone, _ = case.run(True, pick=[3])
    np.testing.assert_array_equal(alone[0], case.run(True)[0][3])


@pytest.mark.parametrize(
    ("changes", "sinks", "head_dim", "target", "kept"),
    [
        # Of the eight blocks that leave their parts in memory the longest row needs two.
        ({"window": 300, "cap": 2.0}, True, 96, AMPERE, bf16),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ({"window": 100}, False, 64, HOPPER, bf16),
                ({"window": 107}, True, 64, HOPPER, e4m3),
                ({"window": 1}, True, 64, AMPERE, bf16),
                ({"cap": 5.0}, True, 128, HOPPER, bf16),
            ]
        ),
    ],
    ids=["all", "window", "window of codes", "sinks", "cap"],
)
def test_windows_caps_and_sinks(changes, sinks, head_dim, target, kept):
    """Rows, and a tile of more queries than a block has: its last ones do not see all that its first ones do."""
    shape = AttentionShape(2, 1, head_dim, 8, 0.3, 1e-6, **changes)
    check(Case(shape, [0, 45, -1, 16, 600, 17], [(390, 70)], 72, kept=kept, sinks=sinks, target=target), False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("heads", "head_dim", "kept", "target"),
    [(3, 96, bf16, HOPPER), (3, 96, e4m3, AMPERE), (4, 256, bf16, AMPERE), (10, 256, e4m3, HOPPER)],
)
def test_other_head_dimensions(heads, head_dim, kept, target):
    shape = AttentionShape(heads, 1, head_dim, 16, head_dim**-0.5, 1e-6)
    check(Case(shape, [0, 45], [(61, 3)], 8, kept=kept, target=target), True)


def test_rings_fit_into_shared_memory():
    """Every size that is supported, on every GPU that is."""
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "13.0"):
        target = target_of(capability)
        assert target is not None
        for head_dim, group, pairs, fp8 in itertools.product((64, 96, 128, 256), (1, 7, 16), (1, 999), (False, True)):
            found = form(pairs, AttentionShape(group, 1, head_dim, 16, 1.0, 1e-6), fp8, target)
            assert found.shared <= target.shared
            assert found.cluster == 1 or target.clusters
    assert target_of("9.0") is HOPPER
    for other in ("7.5", "gfx942", "", capability_of(jax.devices()[0])):
        assert target_of(other) is None


@dataclass(frozen=True)
class Codes(Kernel):
    """Converts pairs of bf16."""

    @property
    def body(self) -> str:
        text = (
            "KERNEL(codes, 32, 1)(const u32* x, KeptPair* to) {"
            " int i = block_x() * 32 + lane(); to[i] = kept(x[i], 1); }"
        )
        return super().body + text


def test_codes_without_an_instruction_for_them():
    """Every bf16 has the nearest code, or the largest, as NumPy has it."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    words = every.view(np.uint32)
    sizes = {"HEADS": 1, "KV_HEADS": 1, "HEAD_DIM": 64, "EPS": 0.0, "SCALE": 1.0, "CAP": 0.0, "FP8": 1, "CONVERTS": 0}
    sizes |= {"BLOCK": 16, "CODED": 16}
    made = Codes("codes", ("heads.cuh",), tuple(sizes.items()), 32, 0)
    (found,) = run_kernel(made, (len(words) // 32, 1, 1), [words], [jax.ShapeDtypeStruct(words.shape, np.uint16)])
    with np.errstate(all="ignore"):
        wanted = np.clip(every.astype(np.float32), -448, 448).astype(E4M3)
    np.testing.assert_array_equal(found.view(E4M3).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("kept", [bf16, e4m3])
def test_only_rows_and_only_tiles(kept):
    shape = AttentionShape(4, 2, 64, 8, 0.1, 1e-6)
    check(Case(shape, [100, 1], [], 8, kept=kept), True)
    # More queries than a block of the kernel has.
    check(Case(shape, [], [(13, 70)], 72, kept=kept), True)


@pytest.mark.parametrize("kept", [bf16, e4m3])
def test_a_row_does_not_depend_on_the_batch(kept):
    case = Case(AttentionShape(4, 2, 64, 8, 0.1, 1e-6), [500, 77, 3, 1200], [(5, 5)], 8, kept=kept)
    together, _ = case.run(True)
    alone, _ = case.run(True, pick=[1])
    np.testing.assert_array_equal(alone[0], together[1])
    case.rows = np.pad(case.rows, ((0, 0), (0, 9)))
    wider, _ = case.run(True, pick=[3])
    np.testing.assert_array_equal(wider[0], together[3])


def test_the_smallest_codes_count():
    """Values so far below the largest that codes have no exponent: a GPU that took them for zeros would give zeros."""
    case = Case(AttentionShape(4, 2, 64, 8, 0.1, 1e-6), [40, 301], [(70, 6)], 8, kept=e4m3)
    tiny = np.random.default_rng().integers(1, 8, case.numbers.shape) * 2.0**-9
    tiny[..., 0] = 448
    tiny[:, 0] = case.numbers[:, 0]
    case.hold(np.where(np.isnan(case.numbers), np.nan, tiny))
    case.qkv[:, -2 * 64 :] = 2.0**-8
    out, _ = case.run(True)
    expected, _ = case.expected(True)
    small = np.arange(out.shape[1]) % 64 > 0
    assert 2.0**-9 < expected[:2, small].min() < expected[:, small].max() < 2.0**-6
    np.testing.assert_allclose(out.astype(np.float64)[:, small], expected[:, small], rtol=0.02, atol=0)


def test_scales_end_where_bf16_times_a_power_of_two_does():
    """Values of millions: what is kept of them is 448 times 255, with its sign, and so is what comes out."""
    case = Case(AttentionShape(2, 1, 64, 8, 1e-7, 1e-6), [9], [(3, 4)], 8, kept=e4m3)
    case.qkv *= 1e8
    out, pool = case.run(False)
    written = case.held(pool, case.slots[case.positions >= 0])[1]
    assert np.isfinite(out.astype(np.float32)).all()
    assert (np.abs(written) == 448 * 255).mean() > 0.9
    assert np.abs(written).max() == 448 * 255


def sized(kept: Callable[[np.ndarray], np.ndarray], size: float, outlier: float, seed: int) -> Case:
    """Return a case with keys and values of this size, four larger channels, and scores of about 1."""
    channels = np.where(np.arange(128) % 32 == 5, outlier, 1.0) * size
    factors = np.stack([np.full(128, 1 / np.linalg.norm(channels))] * 4 + [channels] * 4)
    case = Case(AttentionShape(4, 2, 128, 8, 1.0, 1e-6), [200, 31], [(90, 5)], 8, seed=seed, kept=kept)
    case.hold(np.random.default_rng(seed).standard_normal(case.numbers.shape) * channels + 0 * case.numbers)
    case.qkv = bf16(case.qkv.reshape(-1, 8, 128) * factors).reshape(len(case.qkv), -1)
    case.cos, case.sin = np.ones_like(case.cos), np.zeros_like(case.sin)
    return case


@pytest.mark.parametrize(("size", "outlier"), [(1.0, 50.0), (1e-4, 1.0), (1e-4, 50.0), (1e4, 1.0)])
def test_keys_and_values_of_any_size_are_as_precise_as_codes(size, outlier, seed):
    """Compared with fp64 attention over what was not rounded: the error is that of three bits of mantissa."""
    case, exact = (sized(kept, size, outlier, seed) for kept in (e4m3, bf16))
    live = case.positions >= 0
    wanted, found = exact.expected(False)[0][live], case.run(False)[0][live].astype(np.float64)
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
    if size != 1:
        plain = sized(lambda x: np.clip(x.astype(np.float32), -448, 448).astype(E4M3), size, outlier, seed)
        clipped = plain.expected(False)[0][live]
        assert np.linalg.norm(clipped - wanted) > 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((8, 8, 64, 8, "float32"), "float32: expected bfloat16"),
        ((8, 8, 80, 8, "bfloat16"), "head_dim 80: expected one of (64, 96, 128, 256)"),
        ((32, 1, 64, 8, "bfloat16"), "32 query heads"),
        ((8, 8, 64, 12, "bfloat16"), "multiple of 8"),
        ((8, 2, 128, 64, "bfloat16"), None),
    ],
)
def test_what_they_are_not_made_for(sizes, reason):
    found = refusal(*sizes)
    assert found is None if reason is None else reason in found

"""The emulator of CUDA kernels: it computes what a GPU would, and says what is wrong."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.kernels.cuda import launch
from fullstride.llm.kernels.cuda.launch import Kernel
from tests.llm.kernels.emulation import EmulationError, run


@dataclass(frozen=True)
class Text(Kernel):
    """A kernel whose source is given."""

    text: str = ""

    @property
    def body(self) -> str:
        return self.text


def kernel(text: str, threads: int = 32, shared: int = 0) -> Text:
    return Text("test", (), (), threads, shared, text=text)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(np.float32))


MMA = """
KERNEL(test, 32, 1)(const u16* a, const u16* b, float* c) {
  SHARED(memory);
  int i = lane();
  copy16(memory + 16 * i, (const uint4*)a + i, true);
  copy16(memory + 512 + 16 * (i % 16), (const uint4*)b + i % 16, i < 16);
  copies_commit();
  copies_wait<0>();
  sync_lanes();
  if (TURNED) ((u16*)memory)[0] = 0;
  u32 words[4], right[4];
  float sums[4] = {};
  load_matrices(words, memory + (i % 16) * 32 + i / 16 * 16);
  load_matrices_turned(right, memory + 512 + (i % 16) * 16);
  mma(sums, words[0], words[1], words[2], words[3], right[0], right[1]);
  for (int n = 0; n < 4; n++) c[(i / 4 + n / 2 * 8) * 8 + i % 4 * 2 + n % 2] = sums[n];
}
"""


def test_matrix_products():
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((16, n)).astype(ml_dtypes.bfloat16) for n in (16, 8))
    text = MMA.replace("i < 16", "true").replace("if (TURNED) ((u16*)memory)[0] = 0;", "")
    (c,) = run(kernel(text, shared=1024), (1, 1, 1), [a, b], [f32(16, 8)])
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64), atol=1e-5)
    # A wait forgotten.
    (late,) = run(kernel(text.replace("copies_wait<0>();", ""), shared=1024), (1, 1, 1), [a, b], [f32(16, 8)])
    assert np.isnan(late).all()


RING = """
// The last warp copies rows into a ring of two; the first one adds them up.
KERNEL(test, 64, 1)(const float* x, float* y) {
  SHARED(memory);
  u64* full = (u64*)(memory + 1024);
  u64* empty = full + 2;
  if (thread() == 0)
    for (int i = 0; i < 2; i++) bar_init(full + i, 1), bar_init(empty + i, 1);
  bars_ready();
  sync_block();
  x += block_x() * 10 * 32, y += block_x() * 32;
  if (thread() == 32)
    for (int i = 0; i < 10; i++) {
      bar_wait(empty + i % 2, i / 2 % 2 ^ 1);
      bar_expect(full + i % 2, 128);
      bulk_copy(memory + i % 2 * 128, x + i * 32, 128, full + i % 2);
    }
  if (thread() >= 32) return;
  float sum = 0;
  for (int i = 0; i < 10; i++) {
    bar_wait(full + i % 2, i / 2 % 2);
    sum += ((float*)(memory + i % 2 * 128))[lane()];
    sync_lanes();
    if (lane() == 0) bar_arrive(empty + i % 2);
  }
  y[lane()] = sum;
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_ring_of_copies(seed):
    x = np.random.default_rng().standard_normal((3, 10, 32)).astype(np.float32)
    (y,) = run(kernel(RING, 64, 1100), (3, 1, 1), [x], [f32(3, 32)], seed=seed)
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)


def test_a_ring_without_waiting():
    x = np.ones((3, 10, 32), np.float32)
    for wrong in ("bar_wait(full + i % 2, i / 2 % 2);", "bar_wait(empty + i % 2, i / 2 % 2 ^ 1);"):
        found = []
        for seed in range(6):
            try:
                (y,) = run(kernel(RING.replace(wrong, ""), 64, 1100), (3, 1, 1), [x], [f32(3, 32)], seed=seed)
                found.append(not np.array_equal(y, x.sum(1)))
            except EmulationError:
                found.append(True)
        assert any(found)


BLOCKS = """
// Each block waits for what the next one writes.
KERNEL(test, 32, 1)(u32* words, u32*) {
  int me = block_x(), last = blocks_x() - 1;
  if (me == last) store_now(words + me * 32 + lane(), 1);
  u32 seen;
  while (me != last && !all_lanes((seen = load_now(words + (me + 1) * 32 + lane())) != 0)) rest();
  if (me != last) store_now(words + me * 32 + lane(), seen + 1);
}
"""


@pytest.mark.parametrize("seed", [0, 7])
def test_blocks_wait_for_each_other(seed):
    words = np.zeros((12, 32), np.uint32)
    results = [jax.ShapeDtypeStruct(words.shape, words.dtype)]
    (out,) = run(kernel(BLOCKS), (12, 1, 1), [words], results, {0: 0}, seed=seed)
    assert (out == np.arange(12, 0, -1)[:, None]).all()
    with pytest.raises(EmulationError, match=r"deadlock:(.|\n)*threads in load_now at kernel:7"):
        run(kernel(BLOCKS.replace("me == last", "me == 99")), (12, 1, 1), [words], results, {0: 0}, seed=seed)
    # Four blocks at a time: they wait for what has not begun.
    with pytest.raises(EmulationError, match="deadlock"):
        run(kernel(BLOCKS), (12, 1, 1), [words], results, {0: 0}, seed=seed, resident=4)


CLUSTER = """
// Of a cluster of four, the blocks that do not end at once add up what all of them have.
CLUSTER_KERNEL(test, 32, 1, 4)(const float* x, float* y) {
  SHARED(memory);
  int rank = block_x() % 4;
  if (rank == 3) return;
  ((float*)memory)[lane()] = x[block_x() * 32 + lane()];
  cluster_arrive(), cluster_wait();
  float sum = 0;
  for (int i = 0; i < 3; i++) sum += beside((float*)memory, i)[lane()];
  LAST
  y[block_x() * 32 + lane()] = sum;
}
"""


@pytest.mark.parametrize("seed", [0, 3])
def test_blocks_of_a_cluster_read_each_other(seed):
    x = np.random.default_rng().standard_normal((2, 4, 32)).astype(np.float32)
    patient = kernel(CLUSTER.replace("LAST", "cluster_arrive_only(), cluster_wait();"), 32, 128)
    (y,) = run(patient, (8, 1, 1), [x], [f32(2, 4, 32)], seed=seed, resident=5)
    np.testing.assert_allclose(y[:, :3], x[:, :3].sum(1, keepdims=True).repeat(3, 1), rtol=1e-5, atol=1e-5)
    with pytest.raises(EmulationError, match="multiple of the cluster"):
        run(patient, (6, 1, 1), [x], [f32(2, 4, 32)])


WRONG = (
    ("if (lane() != 3) sync_block(); y[0] = 1;", "deadlock:\n  31 threads in sync_block at kernel:5"),
    ("if (lane() & 1) sync_lanes(); else all_lanes(true);", "different places"),
    ("y[0] = load((const uint4*)y + 2).x;", "outside of the operands.*byte 32 of the 32 of array 1"),
    ("y[0] = load((const uint4*)(y + 1)).x;", "not aligned to 16"),
    ("y[8] = 1;", "written beyond array 1"),
    ("which[0] = 9;", "wrote into operand 0"),
    ("cluster_wait();", "deadlock:\n  32 threads in cluster_wait"),
    ("copy16(m + 256, y, true);", "outside of shared memory"),
    ("bar_arrive((u64*)m);", "nobody has initialised"),
    ("if (lane() == 0) { bar_init((u64*)m, 1); bar_arrive((u64*)m); bar_wait((u64*)m, 1); }", "deadlock:\n.*bar_wait"),
    ("if (lane() == 0) { bar_init((u64*)m, 1); bulk_copy(m + 16, y, 32, (u64*)m); }", "copies into its shared memory"),
)


@pytest.mark.parametrize("which", range(len(WRONG)))
def test_what_is_wrong(which):
    cases = "".join(f"\n    case {i}: {{ {text} }} break;" for i, (text, _) in enumerate(WRONG))
    text = f"KERNEL(test, 32, 1)(int* which, float* y) {{\n  SHARED(m);\n  switch (which[0]) {{\n{cases}\n  }}\n}}"
    with pytest.raises(EmulationError, match=WRONG[which][1]):
        run(kernel(text, shared=256), (1, 1, 1), [np.full(1, which, np.int32)], [f32(8)])


def test_shared_memory_starts_as_nan():
    text = "KERNEL(test, 64, 1)(float* y) { SHARED(m); y[thread()] = ((float*)m)[thread()]; }"
    (y,) = run(kernel(text, 64, 256), (1, 1, 1), [], [f32(64)])
    assert np.isnan(y).all()


def test_traced():
    text = "KERNEL(test, 32, 1)(const float* x, float* y, float*) { y[block_x() * 32 + lane()] += x[lane()]; }"
    made = kernel(text)

    @jax.jit
    def steps(x, y):
        return jax.lax.fori_loop(0, 3, lambda i, y: launch.call(made, (2, 1, 1), [x, y], [f32(2, 32)], {1: 0})[0], y)

    np.testing.assert_array_equal(steps(jnp.arange(32.0), jnp.ones((2, 32)))[1], 1 + 3 * np.arange(32))

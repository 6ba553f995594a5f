"""Sums over GPUs, as blocks of one emulated grid that write into each other's memory."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fullstride.llm.kernels import choose, shared
from fullstride.llm.kernels.cuda import p2p_all_reduce as device_sum
from fullstride.llm.kernels.cuda.xla_ffi import FfiCall
from tests.llm.engine.test_kernel_sets import HOPPER, MODEL
from tests.llm.kernels import emulation

# All of them in one launch, each a row of the grid.
TOGETHER = """
KERNEL(all_devices, THREADS, 1)(const u8* x, const u8*, const u8*, u8* out, u32* numbers, u8* lines) {
  u8* memory[MOST_RANKS];
  for (int r = 0; r < MOST_RANKS; r++) memory[r] = lines + (u64)(r < RANKS ? r : 0) * 2 * RANKS * MOST_LINES * 16;
  const int rank = block_y();
  sum_of_devices(x + rank * BYTES, out + rank * BYTES, numbers + rank * BLOCKS, memory, rank, block_x(), BLOCKS);
}
"""
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Small enough for fibers."""
    for name, value in {"LARGEST": 4096, "BLOCKS": 3, "THREADS": 32}.items():
        monkeypatch.setattr(device_sum, name, value)
    path = tmp_path / "together.cu"
    path.write_text(TOGETHER)

    def made(dtype: str, count: int, ranks: int):
        own = device_sum.kernel(dtype, count, ranks)
        return replace(own, name="all_devices", files=(*own.files, str(path)))

    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (2, 1), (3, 2), (8, 3)])
def test_every_device_has_the_same_sum_again_and_again(few, dtype, ranks, seed):
    """Sums of several sizes follow one another in memory that is never cleared."""
    draw = np.random.default_rng()
    numbers = np.zeros((ranks, device_sum.BLOCKS), np.uint32)
    lines = np.zeros((ranks, device_sum.memory_bytes(ranks)), np.uint8)
    for turn, size in enumerate([512, 40, 512, 1024 if dtype == "float32" else 2048, 4]):
        x = draw.standard_normal((ranks, size)).astype(TYPES[dtype])
        kernel = few(dtype, x[0].nbytes, ranks)
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, numbers, lines)]
        grid, replaced = (device_sum.BLOCKS, ranks, 1), {1: 1, 2: 2}
        out, numbers, lines = emulation.run(kernel, grid, [x, numbers, lines], results, replaced, seed=seed + turn)
        expected = x.astype(np.float64).sum(0)
        tolerance = 1e-6 if dtype == "float32" else 2.0**-8
        np.testing.assert_allclose(out[0].astype(np.float64), expected, rtol=tolerance, atol=1e-5)
        assert all(np.array_equal(out[0], each) for each in out)
        assert (numbers == turn + 1).all()


def replaced(device, **more):
    return SimpleNamespace(**vars(device) | more)


class Near:
    """A driver whose GPUs reach each other, or not."""

    def __init__(self, near: bool):
        self.near, self.asked = near, []

    def __call__(self, ordinals):
        self.asked.append(ordinals)
        return self.near


@pytest.mark.parametrize("near", [True, False])
def test_large_sums_and_gpus_far_from_each_other_are_left_to_xla(monkeypatch, near):
    reach = Near(near)
    monkeypatch.setattr(device_sum.driver, "reach_each_other", reach)
    devices = [replaced(HOPPER, local_hardware_id=i) for i in (1, 3)]
    kernels = shared(choose("paged", MODEL, "bfloat16", 16, devices[0], 2), devices)
    assert reach.asked == [(1, 3)]
    assert kernels.all_reduce is not None
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), (kernels.axis,))
    total = jax.shard_map(kernels.all_reduce, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def made(rows: int, dtype: str) -> list[str]:
        jaxpr = jax.make_jaxpr(total)(jax.ShapeDtypeStruct((rows, 1024), dtype))
        return [e.primitive.name for e in jaxpr.eqns[0].params["jaxpr"].eqns]

    own = ["cuda_device_sum"] if near else ["psum"]
    assert made(128, "bfloat16") == own
    assert made(64, "float32") == own
    assert made(129, "bfloat16") == made(2, "float16") == ["psum"]


def test_one_device_and_the_plain_set_keep_what_they_have():
    assert shared(choose("paged", MODEL, "bfloat16", 16, HOPPER), [HOPPER]).all_reduce is None
    assert shared(choose("plain", MODEL, "bfloat16", 16, HOPPER, 2), [HOPPER] * 2).all_reduce is None


class Driver:
    """Notes what is launched with which numbers."""

    def __init__(self, monkeypatch):
        self.launched, self.memory = [], iter(range(1000, 9000, 1000))
        monkeypatch.setattr(device_sum.driver, "zeros", lambda ordinal, count: next(self.memory) + ordinal)
        monkeypatch.setattr(device_sum.driver, "function", lambda ptx, name: (ptx, name))
        monkeypatch.setattr(device_sum.driver, "PreparedLaunch", self.launch)
        monkeypatch.setattr(device_sum.Kernel, "ptx", "the code")

    def launch(self, function, grid, threads, shared, pointers, early):
        assert (function, grid, early) == (("the code", "device_sum"), (device_sum.BLOCKS, 1, 1), False)

        def call(stream, values):
            assert len(values) == pointers
            self.launched.append((stream, values))

        return call


def test_each_device_gets_everyones_memory_and_its_own_rank(monkeypatch):
    noted = Driver(monkeypatch)
    made = device_sum.kernel("bfloat16", 2048, 2)
    monkeypatch.setattr(device_sum, "_made", {"a": ((1, 3), 0, made), "c": ((1, 3), 1, made)})
    monkeypatch.setattr(device_sum, "_memory", functools.cache(device_sum._memory.__wrapped__))
    for ordinal in (3, 1):
        monkeypatch.setattr(device_sum.driver, "device", lambda ordinal=ordinal: ordinal)
        device_sum._execute(FfiCall("a", [70 + ordinal, 80 + ordinal], lambda: 5))
    lines, nothing = [1001, 2003], [0] * 6
    assert noted.launched == [
        (5, [73, 83, 4003, *lines, *nothing, 1]),
        (5, [71, 81, 3001, *lines, *nothing, 0]),
    ]
    # Another engine's on the same GPUs.
    device_sum._execute(FfiCall("c", [71, 81], lambda: 5))
    assert noted.launched[2] == (5, [71, 81, 7001, 5001, 6003, *nothing, 0])
    with pytest.raises(KeyError, match="was not created in this process"):
        device_sum._execute(FfiCall("b", [1, 2], lambda: 5))

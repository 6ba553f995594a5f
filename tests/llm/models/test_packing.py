"""Packed matrices of several formats, and their products by both sets that read them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.llm.kernels.emulation  # noqa: F401 # lowers kernels for a CPU
from benchmarks.cases.llm.packed import StoredParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda.sets import made
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.attention import rms_norm
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.packing import PackedReader, Packing
from fullstride.llm.models.tensor_parallel import ShardReader
from fullstride.llm.packed.matrix import JoinedMatrix, PackedMatrix, numbers

CONFIG = ModelConfig("qwen3", 96, 256, 512, 1, 4, 2, 64, 512, qk_norm=True)


class MixedParameters(StoredParameters):
    """Values in another format than queries and keys, as in Q4_K_M files; `up` is not packed."""

    def packed_as(self, name: str) -> str | None:
        last = name.rpartition(".")[2]
        return "Q6_K" if last == "v" else None if last == "up" else super().packed_as(name)


def placed(tiled: bool, *names: str) -> Any:
    parameters, device = MixedParameters(CONFIG, "float32"), jax.devices()[0]
    reader = ShardReader(CONFIG, parameters, "bfloat16", [device])
    return PackedReader(reader, parameters, Packing("stored", tiled)).place(*(f"layers.0.{name}" for name in names))


def whole(matrix: Any) -> np.ndarray:
    """All numbers, as the products of bfloat16 have them at best."""
    parts = [numbers(part, jnp.float32) if isinstance(part, PackedMatrix) else part for part in matrix.parts]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


@pytest.mark.parametrize("kernels", [plain(dynamic=False), made("paged", CONFIG, None)], ids=["plain", "paged"])
def test_a_matrix_of_several_formats_is_multiplied_part_by_part(kernels: Kernels):
    rng = np.random.default_rng()
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.bfloat16)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, 256), jnp.bfloat16)
    qkv, gate_up = placed(kernels.tiled, "q", "k", "v"), placed(kernels.tiled, "gate", "up")
    assert [part.format for part in qkv.parts] == ["Q4_K", "Q6_K"]
    assert [part.shape for part in qkv.parts] == [(384, 256), (128, 256)]
    assert [type(part) for part in gate_up.parts] == [PackedMatrix, type(x)]
    for matrix in (qkv, gate_up):
        assert isinstance(matrix, JoinedMatrix)
        bias = jnp.asarray(rng.standard_normal(len(whole(matrix))), jnp.bfloat16)
        run = jax.jit(lambda x, matrix, bias: kernels.project(x, matrix, norm=(norm, 1e-6), bias=bias))
        text = run.lower(x, matrix, bias).as_text()
        assert ("callback" in text) == (kernels.name == "paged")
        normal = np.asarray(rms_norm(x, norm, 1e-6), np.float64)
        expected = normal @ whole(matrix).T + np.asarray(bias, np.float64)
        found = np.asarray(run(x, matrix, bias), np.float64)
        assert np.abs(found - expected).max() < 2**-7 * np.abs(expected).max()

"""Kernels of the paged set, compiled to machine code for every GPU that it runs on; needs NVRTC and Triton's ptxas."""

import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.kernels.cuda import nvrtc
from fullstride.llm.kernels.cuda.attention import attention
from fullstride.llm.kernels.cuda.launch import Kernel
from fullstride.llm.kernels.cuda.packed_product import PackedProduct, division
from fullstride.llm.kernels.cuda.packed_product import kernel as packed_kernel
from fullstride.llm.kernels.cuda.skinny_product import project
from fullstride.llm.kernels.cuda.target import Target, target_of
from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, QKNorm, StepBatch
from fullstride.llm.packed.formats import FORMATS

pytestmark = pytest.mark.thorough
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


@pytest.fixture(scope="module")
def ptxas() -> str:
    try:
        nvrtc.library()
    except ConfigError as error:
        pytest.skip(str(error))
    return pytest.importorskip("triton").knobs.nvidia.ptxas_blackwell.path


def traced(call: Any, *operands: Any) -> Iterator[Kernel]:
    """Yield the kernels that a function launches."""
    for equation in jax.make_jaxpr(call)(*operands).eqns:
        if equation.primitive.name == "cuda_kernel":
            yield equation.params["kernel"]


def of_attention(target: Target, head_dim: int, pool: str, rows: int = 3, **more: Any) -> Iterator[Kernel]:
    """Yield the kernels of rows and tiles, with eight query heads on two key heads."""
    shape = AttentionShape(8, 2, head_dim, 16, 0.1, 1e-6, **more)
    tokens, real, whole = rows + 2 * 64, partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), jnp.int32
    numbers: Any = [
        jax.ShapeDtypeStruct(size, whole) for size in ((tokens,), (tokens,), (tokens,), (rows, 40), (2, 40))
    ]
    angles: Any = [jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32)] * 2
    kept = jax.ShapeDtypeStruct((2, 2, 640, 2, head_dim), pool)
    call = partial(attention, shape=shape, target=target)
    weights: Any = [real((head_dim,))] * 2
    norms, sinks = QKNorm(*weights), real((8,))
    operands = (real((tokens, 12 * head_dim)), kept, jax.ShapeDtypeStruct((), whole), StepBatch(*numbers, *angles))
    yield from traced(lambda *given: call(*given[:-1], sinks=given[-1]), *operands, norms, sinks)


def of_products(target: Target) -> Iterator[Kernel]:
    real = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for rows, inputs, outputs in ((1, 1024, 4096), (16, 3072, 1024), (9, 1024, 6144)):
        call = partial(project, target=target, exact=rows == 1)
        operands = (real((rows, inputs)), real((outputs, inputs)), real((inputs,)), real((rows, outputs)))
        yield from traced(lambda x, w, norm, own, call=call: call(x, w, norm=(norm, 1e-6), residual=own), *operands)


def of_packed_products(target: Target) -> Iterator[Kernel]:
    """Yield a kernel of every format; of more rows registers are spilled, but for a few words."""
    for form in FORMATS:
        asked = PackedProduct(1, 4096, 4096, form)
        yield packed_kernel(asked, division(asked), target)[0]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spilling(capability, ptxas, tmp_path):
    target = target_of(capability)
    assert target is not None
    kernels = [*of_products(target), *of_attention(target, 128, "bfloat16"), *of_attention(target, 128, FP8_POOL)]
    kernels += [*of_attention(target, 64, "bfloat16", window=100, cap=5.0), *of_attention(target, 96, "bfloat16")]
    kernels += of_packed_products(target)
    kernels += [*of_attention(target, 256, "bfloat16", rows=200, window=100), *of_attention(target, 256, FP8_POOL)]
    assert {kernel.name for kernel in kernels} >= {"skinny_product", "decode_attention", "prefill_attention"}
    assert any(kernel.name == "decode_sums" for kernel in kernels) == (not target.clusters)
    machine = f"sm_{target.capability}" + "a" * target.clusters
    for kernel in dict.fromkeys(kernels):
        (tmp_path / "kernel.ptx").write_text(kernel.ptx)
        line = [
            ptxas,
            "-v",
            f"--gpu-name={machine}",
            str(tmp_path / "kernel.ptx"),
            "-o",
            str(tmp_path / "kernel.cubin"),
        ]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr, f"{kernel.name} {kernel.defines}: {done.stderr}"

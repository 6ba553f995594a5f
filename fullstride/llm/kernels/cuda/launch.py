"""CUDA kernels as JAX operations, lowered to the custom call of JAX's plugin for Triton kernels.

It accepts any PTX, needs no C++ compiler on the user's machine, and XLA captures it in its CUDA graphs.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from fullstride.llm.kernels.cuda.nvrtc import ptx
from fullstride.llm.kernels.cuda.target import HOPPER, Target

TARGET = "triton_kernel_call"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Kernel:
    """Source of a kernel and its launch parameters.

    Attributes:
        name: of the function.
        files: beside this one, one after the other, `device.cuh` before them.
        defines: constants of the source.
        threads: threads of a block.
        shared: bytes of a block's dynamic shared memory.
        target: GPU that it is compiled for.

    """

    name: str
    files: tuple[str, ...]
    defines: tuple[tuple[str, int | float], ...]
    threads: int
    shared: int
    target: Target = HOPPER

    @property
    def body(self) -> str:
        """The source but for `device.cuh`."""
        constants = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        return constants + "".join((HERE / file).read_text() for file in self.files)

    @property
    def ptx(self) -> str:
        """Compiled."""
        return ptx((HERE / "device.cuh").read_text() + self.body, self.files[-1], self.target.architecture)


def call(
    kernel: Kernel,
    grid: tuple[int, int, int],
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run a kernel on arrays.

    Args:
        kernel: whose parameters are pointers to the operands and then to the results.
        grid: blocks.
        operands: arrays, row-major.
        results: shapes and dtypes of what comes out; nothing is in it before.
        aliases: operands that results replace in place, which then have what was in them.

    """
    shapes = tuple(ShapedArray(result.shape, result.dtype) for result in results)
    return tuple(
        kernel_p.bind(*operands, kernel=kernel, grid=grid, shapes=shapes, aliases=tuple((aliases or {}).items()))
    )


kernel_p = core.Primitive("cuda_kernel")
kernel_p.multiple_results = True
kernel_p.def_abstract_eval(lambda *_, shapes, **__: shapes)


@functools.cache
def _configuration(kernel: Kernel, grid: tuple[int, int, int], pointers: int) -> bytes:
    from jax._src.lib import gpu_triton

    sizes = (kernel.name, kernel.threads // 32, 1, kernel.shared)
    compiled = gpu_triton.TritonKernel(*sizes, kernel.ptx, "", kernel.target.capability)
    parameters = [gpu_triton.create_array_parameter(0, 16) for _ in range(pointers)]
    return zlib.compress(gpu_triton.TritonKernelCall(compiled, *grid, parameters).to_proto(kernel.name, b""))


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, kernel: Kernel, grid: Any, shapes: Any, aliases: Any) -> Any:
    configuration = _configuration(kernel, grid, len(operands) + len(shapes))
    rule: Any = jax.ffi.ffi_lowering(
        TARGET,
        api_version=2,
        backend_config=configuration,  # pyright: ignore[reportArgumentType] # bytes, which this version of the call takes
        operand_output_aliases=dict(aliases),
    )
    return rule(ctx, *operands)


mlir.register_lowering(kernel_p, _lower, platform="cuda")

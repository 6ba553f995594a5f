"""Helpers that the attention launchers share: strides, tile descriptors, constants of a configuration."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fullstride.device.triton_compile import address, mock_tensor
from fullstride.jvp.attention.backward_table import BackwardConfig
from fullstride.jvp.attention.forward_table import ForwardConfig, pick
from fullstride.jvp.attention.layout import visible_band
from fullstride.jvp.attention.tiles import Tiling, pieces

Strides = tuple[int, int, int, int]

# A tile's offsets are 32-bit integers if those of its 256 rows and columns fit.
WIDE_STRIDE = 2**31 // 256


def capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of the tensor's GPU; Hopper's for the interpreter on a CPU."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def strides_of(x: Tensor | None) -> Strides:
    """Strides of (batch, head, row, column); packed rows have no batch.

    Zeros for what is absent: Triton 3.6 loses the constants that follow a None in a tuple of tuples.
    """
    if x is None:
        return 0, 0, 0, 0
    if x.dim() == 3:
        return 0, x.stride(1), x.stride(0), x.stride(2)
    return x.stride(0), x.stride(1), x.stride(2), x.stride(3)


def fits_tma(x: Tensor | None) -> bool:
    """Return whether the tensor memory accelerator can copy x's rows: 16-byte strides, nothing broadcast or empty."""
    if x is None:
        return True
    outer = zip(x.shape[:3], x.stride()[:3], strict=True)
    aligned = all(size == 1 or (s > 0 and s * x.itemsize % 16 == 0) for size, s in outer)
    return aligned and x.stride(3) == 1 and address(x) % 16 == 0 and x.numel() > 0


def describe(inputs: Any, config: ForwardConfig | BackwardConfig) -> list[TensorDescriptor | None]:
    """Descriptors of the inputs' tiles; q, k, v, their tangents, go and gto in this order."""
    d, dv = pieces(inputs[0].shape[-1])[1], pieces(inputs[2].shape[-1])[1]
    blocks = [(config.block_m, d), (config.block_n, d), (config.block_n, dv)] * 2 + [(config.block_m, dv)] * 2
    return [None if x is None else descriptor(x, *block) for x, block in zip(inputs, blocks, strict=False)]


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of a head's rows."""
    return TensorDescriptor(mock_tensor(x), list(x.shape), [*aligned_strides(x), 1], [1, 1, rows, columns])


def aligned_strides(x: Tensor) -> list[int]:
    """The outer strides, for a descriptor: that of a size 1 is never used, but must be a multiple of 16 bytes."""
    return [s if n > 1 else 16 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU the current one, on which kernels are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def band(causal: bool, window: tuple[int, int] | None, furthest: int) -> tuple[tuple[int, int], tuple[bool, bool]]:
    """Keys seen to the left and right, as numbers that stay small, and whether either side has a limit."""
    left, right = visible_band(causal, window)
    return (min(max(left, 0), furthest), min(max(right, 0), furthest)), (left >= 0, right >= 0)


def as_pointer(mask: Tensor | None) -> Tensor | None:
    """A boolean mask as bytes, which Triton can load."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def index_type(strides: Sequence[Strides]) -> Any:
    """The integers that offsets within a tile need."""
    return tl.int64 if max(s for stride in strides for s in stride) >= WIDE_STRIDE else tl.int32


def stride_step(x: Tensor, strides: Sequence[Strides]) -> int:
    """Numbers in 16 bytes if Triton must know that outer strides are multiples of those; else 1.

    It sees multiples of 16 numbers itself, and 72 is none.
    """
    step, outer = 16 // x.itemsize, [s for stride in strides for s in stride[:3]]
    return 1 if any(s % step for s in outer) or all(s % 16 == 0 for s in outer) else step


def tiling(
    q: Tensor,
    v: Tensor,
    strides: Sequence[Strides],
    config: ForwardConfig | BackwardConfig,
    sides: tuple[bool, bool],
    **more: Any,
) -> dict[str, Any]:
    """The constants and options of a launch; `strides` end with the mask's, and `more` are those of one kernel."""
    constants = Tiling(
        qk=pieces(q.shape[-1]),
        v=pieces(v.shape[-1]),
        block_m=config.block_m,
        block_n=config.block_n,
        stages=config.stages,
        left=sides[0],
        right=sides[1],
        index=index_type(strides),
        step=stride_step(q, strides[:-1]),
        **more,
    )
    return {"C": constants, "num_warps": config.warps, "num_stages": config.stages}


def takes_tma(inputs: Any) -> bool:
    """Return whether the tensor memory accelerator can copy every input's tiles; not those of packed sequences."""
    whole = not pieces(inputs[0].shape[-1])[2] and not pieces(inputs[2].shape[-1])[2]
    return whole and all(x is None or (x.dim() == 4 and fits_tma(x)) for x in inputs)


def chosen(
    inputs: Any, keys: int, masked: bool, precision: str, config: ForwardConfig | None
) -> tuple[ForwardConfig, bool]:
    """The caller's configuration or the table's, and whether tiles are copied by the tensor memory accelerator."""
    q, v, tma = inputs[0], inputs[2], takes_tma(inputs)
    if config is None:
        config = pick(q.dtype, q.shape[-1], v.shape[-1], keys, capability(q), precision, tma, masked)
    return config, tma and config.tma


def takes_specialised(inputs: Any, mask: Tensor | None, window: Any, scale: float) -> bool:
    """Return whether Hopper's warp-specialised kernel supports the inputs; its limits are those of `hopper_kernel`."""
    q, k, v, *tangents = inputs
    if not q.is_cuda or capability(q)[0] != 9 or q.itemsize != 2 or any(t is None for t in tangents):
        return False
    dims = q.shape[3] in (64, 128) and v.shape[3] == q.shape[3]
    whole = mask is None and (window is None or max(window) < 0)
    return dims and whole and scale > 0 and k.shape[2] > 0 and all(map(fits_tma, inputs))

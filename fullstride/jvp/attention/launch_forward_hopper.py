"""Launch of the warp-specialised forward on a Hopper GPU, for the inputs that it supports."""

from typing import Any

import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fullstride.device.triton_compile import launch, mock_tensor
from fullstride.jvp.attention.forward_table import SpecialisedConfig
from fullstride.jvp.attention.hopper_kernel import ROWS, Options, dual_forward_hopper
from fullstride.jvp.attention.launch_common import aligned_strides, on_device

# A copying warp and two groups of four: 12 warps share 65,536 registers.
REGISTERS = 168


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of a head's rows."""
    block = [1, 1, rows, x.shape[3]]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(mock_tensor(x), list(x.shape), [*aligned_strides(x), 1], block, layout)


def launch_specialised(inputs: Any, outputs: Any, scale: float, causal: bool, config: SpecialisedConfig) -> None:
    """Fill o, to, lse and mu from q, k, v, tq, tk, tv, as `forward` does."""
    q, k = inputs[:2]
    b, heads, len_q, _ = q.shape
    len_k = k.shape[2]
    blocks = triton.cdiv(len_q, 2 * ROWS.value)
    if b * heads * blocks == 0:
        return
    rows = (ROWS.value, config.block_n, config.block_n) * 2
    tiles = [descriptor(x, n) for x, n in zip(inputs, rows, strict=True)]
    results = [descriptor(x, ROWS.value) for x in outputs[:2]]
    edge = causal or len_k % config.block_n != 0
    sizes = heads, heads // k.shape[1], len_q, len_k, blocks
    arguments = [*tiles, *results, outputs[2:], scale, sizes]
    constants = {"C": Options(causal, edge, config.stages, config.turns), "num_warps": 4, "maxnreg": REGISTERS}
    with on_device(q):
        launch(dual_forward_hopper, (b * heads * blocks,), arguments, constants)

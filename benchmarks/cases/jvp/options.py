"""Options of the cases `jvp-...` of `python -m benchmarks`; nothing here needs PyTorch."""

from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, Device, Seconds, among

IMPLEMENTATIONS = ("auto", "plain", "triton")
Implementation = Annotated[
    str, among("auto|plain|triton", "Implementation of the ops: PyTorch operations or Triton kernels."), IMPLEMENTATIONS
]
Jobs = Annotated[int, typer.Option(min=0, help="Number of processes that compile kernels beforehand.")]


@dataclass(frozen=True)
class AttentionOptions(CaseOptions):
    """Attention with its forward derivative, and both backward passes, compared with PyTorch's own."""

    device: Device = "auto"
    precision: Annotated[
        str,
        among("bf16|fp16|fp32|tf32|tf32x3", "Format of the tensors; tf32 and tf32x3 are for products of fp32 tensors."),
    ] = "bf16"
    implementation: Implementation = "auto"
    shapes: Annotated[
        str | None,
        among("small|reference|speed|large|odd|all", "List of sizes; if not given, small on a CPU, else large."),
    ] = None
    seconds: Seconds = 600.0
    jobs: Jobs = 8


@dataclass(frozen=True)
class NormsOptions(CaseOptions):
    """Norms with their forward derivatives, in bytes per second compared with a copy."""

    device: Device = "auto"
    precision: Annotated[str, among("bf16|fp16|fp32", "Format of the activations.")] = "bf16"
    implementation: Implementation = "auto"
    shapes: Annotated[
        str | None, among("small|models|odd|all", "List of sizes; if not given, small on a CPU, else models.")
    ] = None
    seconds: Seconds = 180.0
    jobs: Jobs = 8


OPS = ("group_norm", "layer_norm", "rms_norm", "attention", "linear", "conv2d", "silu", "gelu", "add", "mul")


@dataclass(frozen=True)
class HostOptions(CaseOptions):
    """Host time of ops on tiny tensors: in PyTorch and under a derivative, eager and compiled."""

    device: Device = "auto"
    precision: Annotated[str, among("bf16|fp16|fp32", "Format of the tensors."), ("bf16", "fp16", "fp32")] = "bf16"
    only: Annotated[tuple[str, ...], among("OP", "Op to measure; may be repeated. All if not given."), OPS] = ()
    compiled: Annotated[bool, typer.Option(help="Measure compiled passes, too.")] = True
    seconds: Seconds = 600.0


NETWORKS = ("timm-vit", "diffusers-unet", "unet", "unet-torch-norms")


@dataclass(frozen=True)
class NetworksOptions(CaseOptions):
    """Training passes of whole networks of other libraries, with a forward derivative and without."""

    device: Device = "auto"
    precision: Annotated[str, among("bf16|fp32", "Precision of the passes (bf16: autocast)."), ("bf16", "fp32")] = (
        "bf16"
    )
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images.")] = 64
    only: Annotated[tuple[str, ...], among("NETWORK", "Network to measure; may be repeated."), NETWORKS] = ()
    small: Annotated[bool, typer.Option(help="Take small networks, as on a processor.")] = False
    seconds: Seconds = 600.0

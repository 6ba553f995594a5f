"""Kernel sets for NVIDIA GPUs."""

from functools import partial
from typing import Any

from fullstride.llm.config import ModelConfig, parameter_count
from fullstride.llm.kernels.cuda import layers, token
from fullstride.llm.kernels.cuda.attention import attention
from fullstride.llm.kernels.cuda.attention import refusal as attention_refusal
from fullstride.llm.kernels.cuda.packed_product import packed_product
from fullstride.llm.kernels.cuda.skinny_product import project
from fullstride.llm.kernels.cuda.target import HOPPER, Target, capability_of, target_of
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.kernels import project as xla_project
from fullstride.llm.kernels.xla.sampling import sample, score


def gpu_refusal(name: str, capability: str) -> str | None:
    """Return why a kernel set cannot run on a device of a compute capability, or None if it can."""
    target = target_of(capability)
    if name != "paged" and target is not HOPPER:
        return f"made for a GPU of compute capability 9.0 (H100, H200), not for {capability}"
    if target is None:
        return f"made for an NVIDIA GPU of compute capability 8.0 or newer, not for {capability}"
    return None


def refusal(name: str, model: ModelConfig, dtype: str, block: int, device: Any) -> str | None:
    """Return why a kernel set cannot run a model on a device, or None if it can."""
    reason = gpu_refusal(name, capability_of(device)) or attention_refusal(
        model.heads, model.kv_heads, model.head_dim, block, dtype
    )
    if reason or name != "token":
        return reason
    if reason := token.refusal(model):
        return reason
    # A second copy of the weights may take what keys and values leave of the device.
    weights, limit = 2 * parameter_count(model), device.memory_stats()["bytes_limit"]
    if 2 * weights > limit / 2:
        return f"two copies of {weights / 1e9:.1f} GB of weights take more than half of {limit / 1e9:.1f} GB"
    return None


def made(name: str, model: ModelConfig, device: Any, target: Target = HOPPER) -> Kernels | str:
    """Return a kernel set, or the reason why it cannot run.

    Args:
        name: `paged` has attention of our own, and on other GPUs than Hopper products of few rows; `chained` also the
            layers of decode steps as one chain; `token` also decode steps of few rows in one launch.
        model: configuration of the model.
        device: whose multiprocessors get a block each of that launch.
        target: GPU that the kernels are compiled for; the last two sets need the default.

    """
    # Packed matrices come in tiles, and only to `paged`.
    others = partial(xla_project, packed=partial(packed_product, target=target))
    # Those of few rows in bf16 have not been timed beside XLA's on a Hopper GPU.
    own = others if target is HOPPER else partial(project, target=target, others=others)
    chain = layers.layers(model) if name != "paged" else None
    if name == "chained" and chain is None:
        return "its projections cannot be divided among thread blocks"
    whole = token.fused_step(model, device.core_count) if name == "token" else None
    return Kernels(
        name, False, own, partial(attention, target=target), sample, score,
        fused_step=whole, fused_layers=chain, static_burst=True, tiled=True,
    )  # fmt: skip

"""Kernel sets for Hopper GPUs."""

from functools import partial
from typing import Any

from fullstride.llm.config import ModelConfig, parameter_count
from fullstride.llm.kernels.cuda import layers, token
from fullstride.llm.kernels.cuda.attention import attention
from fullstride.llm.kernels.cuda.attention import refusal as attention_refusal
from fullstride.llm.kernels.cuda.packed_product import packed_product
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.kernels import project
from fullstride.llm.kernels.xla.sampling import sample, score

CAPABILITY = "9.0"


def refusal(name: str, model: ModelConfig, dtype: str, block: int, device: Any) -> str | None:
    """Return why a kernel set cannot run a model on a device, or None if it can."""
    found = getattr(device, "compute_capability", device.platform)
    if found != CAPABILITY:
        return f"made for a GPU of compute capability {CAPABILITY} (H100, H200), not for {found}"
    reason = attention_refusal(model.heads, model.kv_heads, model.head_dim, block, dtype)
    if reason or name != "token":
        return reason
    if reason := token.refusal(model):
        return reason
    # A second copy of the weights may take what keys and values leave of the device.
    weights, limit = 2 * parameter_count(model), device.memory_stats()["bytes_limit"]
    if 2 * weights > limit / 2:
        return f"two copies of {weights / 1e9:.1f} GB of weights take more than half of {limit / 1e9:.1f} GB"
    return None


def made(name: str, model: ModelConfig, device: Any) -> Kernels | str:
    """Return a kernel set, or the reason why it cannot run.

    Args:
        name: `paged` has attention of our own and the library's products; `chained` also the layers of decode steps as
            one chain; `token` also decode steps of few rows in one launch.
        model: configuration of the model.
        device: whose multiprocessors get a block each of that launch.

    """
    # Packed matrices come in tiles, and only to `paged`.
    own = partial(project, packed=packed_product)
    chain = layers.layers(model) if name != "paged" else None
    if name == "chained" and chain is None:
        return "its projections cannot be divided among thread blocks"
    whole = token.fused_step(model, device.core_count) if name == "token" else None
    return Kernels(
        name,
        False,
        own,
        attention,
        sample,
        score,
        fused_step=whole,
        fused_layers=chain,
        static_burst=True,
        tiled=True,
    )

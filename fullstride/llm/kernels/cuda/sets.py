"""Sets of kernels for Hopper GPUs."""

from typing import Any

from fullstride.llm.config import ModelConfig, parameter_count
from fullstride.llm.kernels.cuda import layers, token
from fullstride.llm.kernels.cuda.attention import attention
from fullstride.llm.kernels.cuda.attention import refusal as attention_refusal
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.kernels import project
from fullstride.llm.kernels.xla.sampling import sample, score

CAPABILITY = "9.0"


def refusal(model: ModelConfig, dtype: str, block: int, device: Any) -> str | None:
    """Why none of these sets can run a model on a device, or None."""
    found = getattr(device, "compute_capability", device.platform)
    if found != CAPABILITY:
        return f"made for a GPU of compute capability {CAPABILITY} (H100, H200), not for {found}"
    return attention_refusal(model.heads, model.kv_heads, model.head_dim, block, dtype)


def crowding(model: ModelConfig, device: Any) -> str | None:
    """Why a second copy of the weights has no place on a device, half of which is for keys and values; or None."""
    weights = 2 * parameter_count(model)
    limit = device.memory_stats()["bytes_limit"]
    if 2 * weights > limit / 2:
        return f"two copies of {weights / 1e9:.1f} GB of weights take more than half of {limit / 1e9:.1f} GB"
    return None


def paged() -> Kernels:
    """Attention of our own, the library's products."""
    return Kernels("paged", False, project, attention, sample, score, quick=True)


def chained(model: ModelConfig) -> Kernels | str:
    """The same, and the layers of decode steps as one chain; or why that cannot be."""
    made = layers.layers(model)
    return paged()._replace(name="chained", layers=made) if made else "its projections cannot be divided among blocks"


def with_token(model: ModelConfig, processors: int) -> Kernels:
    """The same, if it can be, and decode steps of few rows in one launch on that many multiprocessors."""
    return paged()._replace(name="token", layers=layers.layers(model), whole=token.whole(model, processors))

"""Mixtral: Mistral's layers with a mixture of experts."""

from typing import Any

from fullstride.llm.families.family import (
    GGUF_EXPERT_TENSORS,
    GGUF_EXPERTS,
    Family,
    FileSettings,
    all_windows,
    experts_of,
    gguf_experts,
)


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the windows and the experts."""
    return {**experts_of(settings, "num_local_experts"), "shared_weights": True, "windows": all_windows(settings)}


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return the experts; llama.cpp's converter writes no windows."""
    return gguf_experts(settings)


FAMILY = Family(
    gguf="llama",
    interleaved=True,
    gguf_keys=GGUF_EXPERTS,
    gguf_layers=gguf_layers,
    gguf_tensors=GGUF_EXPERT_TENSORS,
    layers=layers,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    tensors={"block_sparse_moe.gate.weight": "router"},
    expert_tensors={
        f"block_sparse_moe.experts.{{}}.{theirs}.weight": ours
        for theirs, ours in {"w1": "gate", "w2": "down", "w3": "up"}.items()
    },
)

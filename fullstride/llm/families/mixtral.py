"""Mixtral: Mistral's layers with a mixture of experts."""

from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.families.family import Family, FileSettings, all_windows


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the windows and the experts."""
    experts, taken = settings.size("num_local_experts"), settings.size("num_experts_per_tok")
    if taken > experts:
        raise ConfigError(f"{settings.file}: num_experts_per_tok={taken}: expected at most {experts}, the experts")
    own = {"experts": experts, "experts_per_token": taken, "shared_weights": True}
    return {**own, "windows": all_windows(settings)}


FAMILY = Family(
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

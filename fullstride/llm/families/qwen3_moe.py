"""Qwen3 with a mixture of experts in every layer."""

from typing import Any

from fullstride.llm.families.family import (
    GGUF_EXPERT_TENSORS,
    GGUF_EXPERTS,
    Family,
    FileSettings,
    experts_of,
    gguf_experts,
)


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the experts; transformers also knows their number as `num_local_experts`."""
    return {
        **experts_of(settings, "num_experts" if "num_experts" in settings.raw else "num_local_experts"),
        "shared_weights": bool(settings.raw.get("norm_topk_prob")),
        "intermediate_size": settings.size("moe_intermediate_size"),
    }


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return the experts."""
    return gguf_experts(settings)


FAMILY = Family(
    gguf="qwen3moe",
    gguf_keys=GGUF_EXPERTS,
    gguf_layers=gguf_layers,
    gguf_tensors={**GGUF_EXPERT_TENSORS, **{f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"}},
    qk_norm=True,
    layers=layers,
    fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    defaults={"num_experts_per_tok": 8, "num_key_value_heads": 4},
    tensors={**{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"}, "mlp.gate.weight": "router"},
    expert_tensors={f"mlp.experts.{{}}.{name}_proj.weight": name for name in ("gate", "up", "down")},
    ends=("<|im_end|>", "<|endoftext|>"),
)

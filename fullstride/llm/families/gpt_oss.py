"""GPT-OSS: windows in every other layer, attention sinks, experts with biases and a clamped SwiGLU, MXFP4 files."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings, experts_of, mixed_windows

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
    """Take out that experts are packed as MXFP4, which their tensors tell, and put in the RoPE if it is not there."""
    made = dict(raw)
    packing = raw.get("quantization_config")
    if isinstance(packing, dict) and packing.get("quant_method") == "mxfp4":
        del made["quantization_config"]
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        made["rope_scaling"] = ROPE
    return made


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the windows, the experts, and what the layers have of their own."""
    return {
        **experts_of(settings, "num_local_experts"),
        "shared_weights": True,
        "expert_bias": True,
        "output_bias": True,
        "sinks": True,
        "exact_norm": True,
        "activation": "swiglu_clamped",
        "swiglu_limit": settings.decimal("swiglu_limit", 7.0),
        "windows": mixed_windows(settings, 2),
    }


FAMILY = Family(
    qkv_bias=True,
    layers=layers,
    rewritten=rewritten,
    fixed={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    tensors={
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        "self_attn.sinks": "sinks",
        **{f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkvo"},
    },
    stacked_experts={
        "mlp.experts.gate_up_proj": ("gate", "up"),
        "mlp.experts.gate_up_proj_bias": ("gate_bias", "up_bias"),
        "mlp.experts.down_proj": ("down",),
        "mlp.experts.down_proj_bias": ("down_bias",),
    },
    ends=("<|return|>", "<|call|>"),
)

"""GPT-OSS: windows in every other layer, attention sinks, experts with biases and a clamped SwiGLU, MXFP4 files."""

from typing import Any

from fullstride.llm.families.family import (
    GGUF_EXPERT_TENSORS,
    GGUF_EXPERTS,
    Family,
    FileSettings,
    experts_of,
    gguf_experts,
    mixed_windows,
)
from fullstride.llm.families.words import PreTokenizer, cased_words

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


# What its layers have of their own.
PARTS = {
    "shared_weights": True,
    "expert_bias": True,
    "output_bias": True,
    "sinks": True,
    "exact_norm": True,
    "activation": "swiglu_clamped",
}


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the windows, the experts, and what the layers have of their own."""
    return {
        **experts_of(settings, "num_local_experts"),
        **PARTS,
        "swiglu_limit": settings.decimal("swiglu_limit", 7.0),
        "windows": mixed_windows(settings, 2),
    }


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return the same; the bound of gate and up is that of all GPT-OSS models."""
    count, window = settings.size("block_count"), settings.size("attention.sliding_window")
    period = settings.size("attention.sliding_window_pattern", 2)
    windows = tuple(window if (i + 1) % period else None for i in range(count))
    return {**gguf_experts(settings), **PARTS, "windows": windows}


FAMILY = Family(
    qkv_bias=True,
    gguf="gpt-oss",
    gguf_keys=GGUF_EXPERTS | {"attention.sliding_window", "attention.sliding_window_pattern"},
    gguf_layers=gguf_layers,
    gguf_whole_ramp=False,
    gguf_tensors={
        **GGUF_EXPERT_TENSORS,
        "ffn_norm.weight": None,
        "post_attention_norm.weight": "mlp_norm",
        "attn_sinks.weight": "sinks",
        "ffn_gate_inp.bias": "router_bias",
        "attn_output.bias": "o_bias",
        **{f"attn_{name}.bias": f"{name}_bias" for name in "qkv"},
        **{f"ffn_{name}_exps.bias": f"experts.{name}_bias" for name in ("gate", "up", "down")},
    },
    words={"gpt-4o": PreTokenizer(cased_words("{1,3}", contractions=True), ignore_merges=True)},
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

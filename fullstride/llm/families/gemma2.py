"""Gemma 2: windows in every other layer, caps of scores and logits, norms around attention and MLP."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings, mixed_windows, optional

# Of transformers; a config.json may lack what is equal to it.
DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# The other key of an activation is not read by transformers.
FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "hidden_act": ("gelu_pytorch_tanh", "gelu", "silu", None),
    "use_bidirectional_attention": (False, None),
}
TENSORS = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}


def common(settings: FileSettings) -> dict[str, Any]:
    """Return what Gemma 2 and 3 have in common."""
    return {
        "post_norm": True,
        "exact_norm": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": settings.size("hidden_size") ** 0.5,
        "rounded_scale": True,
        "attention_scale": settings.decimal("query_pre_attn_scalar") ** -0.5,
        "logit_cap": optional(settings, "final_logit_softcapping"),
    }


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return also the caps of scores, and the windows: of every other layer, from the first on."""
    cap = optional(settings, "attn_logit_softcapping")
    return {**common(settings), "attention_cap": cap, "windows": mixed_windows(settings, 2)}


GGUF_KEYS = frozenset(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"))
GGUF_TENSORS = {
    "post_attention_norm.weight": "attn_post_norm",
    "ffn_norm.weight": "mlp_norm",
    "post_ffw_norm.weight": "mlp_post_norm",
}


def gguf_common(settings: FileSettings, period: int, largest: int) -> dict[str, Any]:
    """Return what Gemma 2 and 3 have in common.

    A GGUF has neither the layers with windows nor the scale of scores: llama.cpp knows both by the family, and that its
    largest model has another scale.

    Args:
        settings: metadata.
        period: every layer of this number has no window.
        largest: number of layers of the model whose scores are scaled by its width and heads.

    """
    hidden, heads, count = (settings.size(key) for key in ("embedding_length", "attention.head_count", "block_count"))
    wide = hidden // heads if count == largest else settings.size("attention.key_length", hidden // heads)
    window = settings.size("attention.sliding_window") if settings.raw.get("attention.sliding_window") else None
    return {
        "post_norm": True,
        "exact_norm": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": hidden**0.5,
        "rounded_scale": True,
        "attention_scale": wide**-0.5,
        "logit_cap": optional(settings, "final_logit_softcapping"),
        "windows": tuple(window if (i + 1) % period else None for i in range(count)) if window else (),
    }


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return also the caps, of which llama.cpp has defaults."""
    caps = {"logit_cap": ("final_logit_softcapping", 30.0), "attention_cap": ("attn_logit_softcapping", 50.0)}
    found = {field: settings.decimal(key, default) for field, (key, default) in caps.items()}
    return {**gguf_common(settings, 2, largest=46), **found}


FAMILY = Family(
    gguf="gemma2",
    gguf_keys=GGUF_KEYS,
    gguf_layers=gguf_layers,
    gguf_tensors=GGUF_TENSORS,
    layers=layers,
    fixed=FIXED,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    tensors=TENSORS,
    ends=("<end_of_turn>", "<eos>"),
)

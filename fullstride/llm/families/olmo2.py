"""OLMo 2: norms after attention and MLP instead of before, and norms of queries and keys over all heads."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings
from fullstride.llm.families.words import PreTokenizer, plain_words


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return where the norms are; no file says otherwise."""
    return {"pre_norm": False, "post_norm": True, "exact_norm": True, "wide_qk_norm": True}


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return the same."""
    return layers(settings)


FAMILY = Family(
    gguf="olmo2",
    gguf_layers=gguf_layers,
    gguf_tensors={
        "post_attention_norm.weight": "attn_post_norm",
        "post_ffw_norm.weight": "mlp_post_norm",
        **{f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"},
    },
    words={"dbrx": PreTokenizer(plain_words("{1,3}"))},
    qk_norm=True,
    layers=layers,
    fixed={"clip_qkv": (None,)},
    defaults={"rms_norm_eps": 1e-5},
    tensors={
        "post_attention_layernorm.weight": "attn_post_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
        **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
    },
    ends=("<|endoftext|>",),
)

"""ModernBERT (arXiv:2412.13663): rotary positions, local and global attention, gated layers normed first, no biases."""

from typing import Any

from fullstride.bert.model.families.family import Family
from fullstride.errors import ConfigError

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def rewritten(given: dict[str, Any]) -> dict[str, Any]:
    """Entries of newer files in the older ones' words.

    Raises:
        ConfigError: for layers in another order, or another rotary embedding.

    """
    found, kinds = dict(given), given.get("layer_types")
    if kinds:
        every = next((i for i in range(1, len(kinds)) if kinds[i] == GLOBAL), len(kinds))
        if kinds != [LOCAL if i % every else GLOBAL for i in range(len(kinds))]:
            raise ConfigError(f"layer_types={kinds}: expected {GLOBAL} first and at each n-th layer, else {LOCAL}")
        found["global_attn_every_n_layers"] = every
    for kind, old in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
        rope = (given.get("rope_parameters") or {}).get(kind) or {}
        if (name := rope.get("rope_type", "default")) != "default":
            raise ConfigError(f"rope_type={name} of {kind}: expected default")
        found |= {old: rope["rope_theta"]} if "rope_theta" in rope else {}
    return found


FAMILY = Family(
    prefix="model.",
    head=("decoder.",),
    architectures=("ModernBertForMaskedLM", "ModernBertModel"),
    names={
        ".embeddings.tokens": "model.embeddings.tok_embeddings",
        ".embeddings.norm": "model.embeddings.norm",
        ".norm": "model.final_norm",
        ".head.dense": "head.dense",
        ".head.norm": "head.norm",
        ".head": "decoder",
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    layers="model.layers.",
    layer={
        "attention_norm": "attn_norm",
        "attention.projections": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "mlp_norm": "mlp_norm",
        "intermediate": "mlp.Wi",
        "output": "mlp.Wo",
    },
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_length",
        "embedding_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "norm_eps": "norm_eps",
        "initializer_range": "initializer_std",
        "pad_token_id": "padding",
        "local_attention": "local_attention",
        "global_attn_every_n_layers": "global_every",
        "global_rope_theta": "global_theta",
        "local_rope_theta": "local_theta",
    },
    fixed={
        "model_type": ("modernbert",),
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "classifier_bias": (False,),
        "decoder_bias": (True,),
        "mlp_dropout": (0.0,),
        "rope_scaling": (None,),
        "tie_word_embeddings": (True,),
    },
    defaults={"types": 0, "hidden_dropout": 0.0, "norm_eps": 1e-5, "padding": 50_283},
    rewritten=rewritten,
)

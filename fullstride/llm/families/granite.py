"""Granite 3: Llama's layers with factors of their own."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings
from fullstride.llm.families.words import PreTokenizer


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the factors of embeddings, layers, scores and logits."""
    return {
        "embedding_scale": settings.decimal("embedding_multiplier", 1.0),
        "residual_scale": settings.decimal("residual_multiplier", 1.0),
        "attention_scale": settings.decimal("attention_multiplier", 1.0),
        "logit_divisor": settings.decimal("logits_scaling", 1.0),
    }


# By the fields of a `ModelConfig`.
GGUF = {
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "attention_scale": "attention.scale",
    "logit_divisor": "logit_scale",
}


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return the same factors; what a GGUF calls a scale of the logits is their divisor."""
    found = {field: settings.decimal(key) for field, key in GGUF.items() if settings.raw.get(key) is not None}
    return {"attention_scale": 1.0, **found}


FAMILY = Family(
    layers=layers,
    gguf="granite",
    interleaved=True,
    gguf_keys=frozenset(GGUF.values()),
    gguf_layers=gguf_layers,
    words=dict.fromkeys(("refact", "starcoder"), PreTokenizer(single_digits=True)),
    ends=("<|end_of_text|>",),
)

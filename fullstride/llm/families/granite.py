"""Granite 3: Llama's layers with factors of their own."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the factors of embeddings, layers, scores and logits."""
    return {
        "embedding_scale": settings.decimal("embedding_multiplier", 1.0),
        "residual_scale": settings.decimal("residual_multiplier", 1.0),
        "attention_scale": settings.decimal("attention_multiplier", 1.0),
        "logit_divisor": settings.decimal("logits_scaling", 1.0),
    }


FAMILY = Family(layers=layers, ends=("<|end_of_text|>",))

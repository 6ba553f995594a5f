"""Gemma 3's models that see images, whose language model is Gemma 3's: of the others' tensors none is read."""

from dataclasses import replace
from typing import Any

from fullstride.llm.families import gemma3

# Of transformers' text configuration; the files of the makers lack what is equal to it.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Of the whole configuration, before those of its text's.
OUTER = ("model_type", "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")
# Beginnings of names of tensors, by the version of transformers that wrote them.
TEXT = {"language_model.": "", "model.language_model.": "model."}
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
    """Take the configuration of the text."""
    text = raw.get("text_config")
    own = {key: raw[key] for key in OUTER if raw.get(key) is not None}
    return gemma3.rewritten({**gemma3.FAMILY.defaults, **DEFAULTS, **(text if isinstance(text, dict) else {}), **own})


def renamed(name: str) -> str | None:
    """Return the name that a tensor has in a model of text; None for those of images."""
    if name.startswith(IMAGES):
        return None
    start = next((start for start in TEXT if name.startswith(start)), "")
    return TEXT.get(start, "") + name.removeprefix(start)


FAMILY = replace(gemma3.FAMILY, gguf="", defaults={}, rewritten=rewritten, renamed=renamed)

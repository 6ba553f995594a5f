"""SmolLM3, some of whose layers have no RoPE (NoPE, arXiv:2501.18795)."""

from typing import Any

from fullstride.errors import ConfigError, shortened
from fullstride.llm.families.family import Family, FileSettings, layer_count
from fullstride.llm.families.words import PreTokenizer, plain_words


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the layers without RoPE: zeros of `no_rope_layers`, or the last of each `no_rope_layer_interval`."""
    count, rotated = layer_count(settings), settings.raw.get("no_rope_layers")
    if rotated is None:
        interval = settings.size("no_rope_layer_interval", 4)
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or any(each not in (0, 1) for each in rotated):
        found = shortened(str(rotated), 80)
        raise ConfigError(f"{settings.file}: no_rope_layers={found}: expected 1 or 0 for each of {count} layers")
    return {"unrotated": tuple(i for i in range(count) if not rotated[i])}


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return every fourth layer: a GGUF does not say which, and llama.cpp takes these."""
    return {"unrotated": tuple(range(3, settings.size("block_count"), 4))}


FAMILY = Family(
    gguf="smollm3",
    interleaved=True,
    gguf_layers=gguf_layers,
    words={"smaug-bpe": PreTokenizer(plain_words("{1,3}"))},
    layers=layers,
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4},
    ends=("<|im_end|>", "<|end_of_text|>"),
)

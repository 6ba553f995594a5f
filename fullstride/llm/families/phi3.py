"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with some matrices in one, partly rotated heads, and LongRoPE."""

from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.config import LongRope, longest_position
from fullstride.llm.families.family import Family, FileSettings, all_windows
from fullstride.llm.families.words import PreTokenizer, plain_words

# What LongRoPE was called before.
OLD_NAMES = ("su", "yarn")


def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
    """Take out of the RoPE's settings the rotated part of a head, and put into them the original length."""
    made = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), dict):
            continue
        rope = dict(raw[key])
        made["partial_rotary_factor"] = rope.pop("partial_rotary_factor", made.get("partial_rotary_factor"))
        kind = rope.pop("type", None)
        kind = rope.get("rope_type") or kind or "default"
        rope["rope_type"] = "longrope" if kind in OLD_NAMES else kind
        if rope["rope_type"] == "longrope" and raw.get("original_max_position_embeddings") is not None:
            rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        made[key] = rope
    made["rotated_part"] = made.pop("partial_rotary_factor", None)
    return made


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return the windows, and how much of a head is rotated."""
    heads, part = settings.size("num_attention_heads"), settings.decimal("rotated_part", 1.0)
    if part > 1:
        raise ConfigError(f"{settings.file}: partial_rotary_factor={part}: expected at most 1")
    head_dim = settings.size("head_dim", settings.size("hidden_size") // heads)
    return {"windows": all_windows(settings), "rotary_dim": None if part == 1 else int(head_dim * part)}


def gguf_layers(settings: FileSettings, factors: tuple[float, ...]) -> dict[str, Any]:
    """Return the same, and LongRoPE if a GGUF has its factors."""
    count, heads = settings.size("block_count"), settings.size("attention.head_count")
    window = settings.raw.get("attention.sliding_window") or None
    head_dim = settings.size("attention.key_length", settings.size("embedding_length") // heads)
    rotated = settings.size("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rotary_dim": None if rotated == head_dim else rotated}
    if window:
        found["windows"] = (settings.size("attention.sliding_window"),) * count
    if factors:
        original = settings.size("rope.scaling.original_context_length", settings.size("context_length"))
        rope = LongRope(factors, original, settings.decimal("rope.scaling.attn_factor", 1.0))
        length = longest_position(settings.size("context_length"), rope)
        found |= {"rope_scaling": rope, "max_position": length}
    return found


FAMILY = Family(
    gguf="phi3",
    gguf_keys=frozenset(("attention.sliding_window", "rope.dimension_count", "rope.scaling.attn_factor")),
    gguf_layers=gguf_layers,
    gguf_tensors={"attn_qkv.weight": "qkv", "ffn_up.weight": "gate_up", "ffn_gate.weight": None},
    words={"dbrx": PreTokenizer(plain_words("{1,3}"))},
    layers=layers,
    rewritten=rewritten,
    defaults={"rms_norm_eps": 1e-5},
    tensors={"self_attn.qkv_proj.weight": "qkv", "mlp.gate_up_proj.weight": "gate_up"},
    ends=("<|end|>", "<|im_end|>", "<|endoftext|>"),
)

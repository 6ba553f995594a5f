"""Gemma 3's language model: Gemma 2's layers with QK-norm, and two RoPEs instead of caps."""

from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.families.family import FULL, SLIDING, Family, FileSettings, mixed_windows
from fullstride.llm.families.gemma2 import DEFAULTS, FIXED, GGUF_KEYS, GGUF_TENSORS, TENSORS, common, gguf_common


def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
    """Take apart the two RoPEs that files of transformers 5 have in one object."""
    ropes = raw.get("rope_parameters")
    if not isinstance(ropes, dict) or not ropes.keys() & {FULL, SLIDING}:
        return raw
    return {**raw, "rope_parameters": ropes.get(FULL), "window_rope": ropes.get(SLIDING)}


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return also the windows, the base of the RoPE of layers that have one, and the length of a context."""
    rope = settings.inner("window_rope")
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind != "default":
        raise ConfigError(f"{settings.file}: rope_parameters.{SLIDING}.rope_type={kind}: expected default")
    theta = rope.decimal("rope_theta", settings.decimal("rope_local_base_freq"))
    windows = mixed_windows(settings, settings.size("sliding_window_pattern"))
    # Which the factor of its RoPE is in already.
    length = settings.size("max_position_embeddings")
    return {**common(settings), "windows": windows, "window_theta": theta, "max_position": length}


def gguf_layers(settings: FileSettings, _: tuple[float, ...]) -> dict[str, Any]:
    """Return also the base of the RoPE of layers with a window, and the length of a context."""
    found = gguf_common(settings, settings.size("attention.sliding_window_pattern", 6), largest=62)
    theta = settings.decimal("rope.freq_base_swa", 10_000.0) if found["windows"] else None
    return {**found, "window_theta": theta, "max_position": settings.size("context_length")}


FAMILY = Family(
    qk_norm=True,
    gguf="gemma3",
    gguf_keys=(GGUF_KEYS | {"attention.sliding_window_pattern", "rope.freq_base_swa"}) - {"attn_logit_softcapping"},
    gguf_layers=gguf_layers,
    gguf_tensors={**GGUF_TENSORS, **{f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"}},
    layers=layers,
    rewritten=rewritten,
    fixed={**FIXED, "attn_logit_softcapping": (None,)},
    defaults={
        **DEFAULTS,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    tensors={**TENSORS, **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"}},
    ends=("<end_of_turn>", "<eos>"),
)

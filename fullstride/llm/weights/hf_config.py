"""config.json of Llama, Qwen2 and Qwen3 models, as transformers writes it before and since version 5."""

from pathlib import Path
from typing import Any, get_args

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import Architecture, Llama3Rope, ModelConfig
from fullstride.llm.tokenizer_folder import read_json
from fullstride.llm.weights.canonical import check_heads

# What other values would change the arithmetic: a key, and what it may be if it is there.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}
DTYPES = ("float32", "bfloat16", "float16")
ROPES = ("default", "llama3")


def read_config(folder: Path) -> ModelConfig:
    """The model's sizes, and its ends from generation_config.json where that says more; no dtype if it names none.

    Raises:
        ConfigError: if a size is missing, or the model is of a kind that the engine does not run.

    """
    file = folder / "config.json"
    raw = read_json(file)
    _check(file, raw)
    rope = raw.get("rope_parameters") or {}
    generation = read_json(folder / "generation_config.json")
    eos = _ids(generation.get("eos_token_id")) or _ids(raw.get("eos_token_id"))
    heads, hidden = _size(file, raw, "num_attention_heads"), _size(file, raw, "hidden_size")
    config = ModelConfig(
        architecture=raw["model_type"],
        vocab_size=_size(file, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(file, raw, "intermediate_size"),
        layers=_size(file, raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        max_position=_size(file, raw, "max_position_embeddings"),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling(file, rope or raw.get("rope_scaling") or {}),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=raw["model_type"] == "qwen3",
        qkv_bias=raw["model_type"] == "qwen2",
        eos=eos,
        bos=raw.get("bos_token_id"),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "",
    )
    check_heads(file, config)
    if config.dtype:
        one_of(f"{file}: dtype", config.dtype, DTYPES)
    return config


def _check(file: Path, raw: dict[str, Any]) -> None:
    kinds = get_args(Architecture)
    if raw.get("model_type") not in kinds:
        raise ConfigError(f"{file}: model_type={raw.get('model_type')}: expected one of {', '.join(kinds)}")
    for key, allowed in FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{file}: {key}={_short(raw[key])}: models with it are not supported, only {allowed[0]}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _size(file: Path, raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{file}: {key}={value}: expected a positive whole number")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _scaling(file: Path, rope: dict[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPES:
        raise ConfigError(f"{file}: rope_type={kind}: expected one of {', '.join(ROPES)}")
    if kind == "default":
        return None
    try:
        return Llama3Rope(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(f"{file}: the llama3 rope lacks {error.args[0]}") from error

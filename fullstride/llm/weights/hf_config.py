"""config.json of Llama, Qwen2 and Qwen3 models, as transformers writes it before and since version 5."""

from pathlib import Path
from typing import Any, get_args

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import DTYPES, Architecture, ModelConfig, reach
from fullstride.llm.text.tokenizer_folder import read_json
from fullstride.llm.weights.canonical import check_heads
from fullstride.llm.weights.hf_rope import read_rope
from fullstride.llm.weights.settings import Settings, shortened

# What other values would change the arithmetic: a key, and what it may be if it is there.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


def read_config(folder: Path) -> ModelConfig:
    """The model's sizes, and its ends from generation_config.json where that says more; no dtype if it names none.

    Raises:
        ConfigError: if a size is missing, or the model is of a kind that the engine does not run.

    """
    file, ends = folder / "config.json", folder / "generation_config.json"
    settings = Settings(file, read_json(file))
    _check(settings)
    raw = settings.raw
    theta, scaling = read_rope(settings)
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    bos = settings.ids("bos_token_id")
    config = ModelConfig(
        architecture=raw["model_type"],
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.size("intermediate_size"),
        layers=settings.size("num_hidden_layers"),
        heads=heads,
        kv_heads=settings.size("num_key_value_heads", heads),
        head_dim=settings.size("head_dim", hidden // heads),
        max_position=reach(settings.size("max_position_embeddings"), scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=settings.decimal("rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=raw["model_type"] == "qwen3",
        qkv_bias=raw["model_type"] == "qwen2",
        eos=Settings(ends, read_json(ends)).ids("eos_token_id") or settings.ids("eos_token_id"),
        bos=bos[0] if bos else None,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
    )
    check_heads(file, config)
    if config.dtype:
        one_of(f"{file}: dtype", config.dtype, DTYPES)
    return config


def _check(settings: Settings) -> None:
    file, raw, kinds = settings.file, settings.raw, get_args(Architecture)
    if raw.get("model_type") not in kinds:
        raise ConfigError(f"{file}: model_type={raw.get('model_type')}: expected one of {', '.join(kinds)}")
    for key, allowed in FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            found = shortened(raw[key])
            raise ConfigError(f"{file}: {key}={found}: models with it are not supported, only {allowed[0]}")

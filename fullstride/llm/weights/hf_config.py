"""config.json of a model, as transformers writes it before and since version 5."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import (
    DTYPES,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    reach,
    yarn_magnitude,
)
from fullstride.llm.families import Family, family_of
from fullstride.llm.text.tokenizer_folder import read_json
from fullstride.llm.weights.canonical import check_heads
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
    raw = settings.raw
    family = family_of(file, "model_type", raw.get("model_type"))
    _check(settings, family)
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
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        eos=Settings(ends, read_json(ends)).ids("eos_token_id") or settings.ids("eos_token_id"),
        bos=bos[0] if bos else None,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
    )
    check_heads(file, config)
    if config.dtype:
        one_of(f"{file}: dtype", config.dtype, DTYPES)
    return config


def _check(settings: Settings, family: Family) -> None:
    for key, allowed in {**FIXED, **family.fixed}.items():
        if settings.raw.get(key, allowed[0]) not in allowed:
            found = shortened(settings.raw[key])
            raise ConfigError(f"{settings.file}: {key}={found}: models with it are not supported, only {allowed[0]}")


def read_rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """The base theta, and how frequencies are scaled.

    Raises:
        ConfigError: for a kind of scaling that is not supported, or numbers that cannot be.

    """
    new, old = settings.inner("rope_parameters"), settings.inner("rope_scaling")
    length = settings.size("max_position_embeddings")
    theta = new.decimal("rope_theta", old.decimal("rope_theta", settings.decimal("rope_theta", 10_000.0)))
    scaling = _scaling(new if new.raw else old, length)
    if new.raw and old.raw and (theta, scaling) != (old.decimal("rope_theta", theta), _scaling(old, length)):
        raise ConfigError(
            f"{settings.file}: rope_parameters={shortened(new.raw)} and rope_scaling={shortened(old.raw)}: expected one"
            " of them, or two that say the same: keep the one that is meant"
        )
    return theta, scaling


def _scaling(rope: Settings, length: int) -> RopeScaling | None:
    kind = str(rope.raw.get("rope_type") or rope.raw.get("type") or "default")
    if kind not in ROPES:
        raise ConfigError(f"{rope.file}: rope_type={kind}: expected one of {', '.join(ROPES)}")
    if rope.raw.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"{rope.file}: partial_rotary_factor={rope.raw['partial_rotary_factor']}: expected 1")
    return ROPES[kind](rope, length)


def _llama3(rope: Settings, _: int) -> Llama3Rope:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if rope.raw.get(name) is None]:
        raise ConfigError(f"{rope.file}: the llama3 rope lacks {missing[0]}")
    low, high = rope.decimal("low_freq_factor"), rope.decimal("high_freq_factor")
    if low >= high:
        raise ConfigError(f"{rope.file}: low_freq_factor={low}: expected less than high_freq_factor, which is {high}")
    return Llama3Rope(rope.decimal("factor"), low, high, rope.size("original_max_position_embeddings"))


def _yarn(rope: Settings, length: int) -> YarnRope:
    factor = rope.decimal("factor")
    return YarnRope(
        factor,
        rope.size("original_max_position_embeddings", length),
        fast=rope.decimal("beta_fast", 32.0),
        slow=rope.decimal("beta_slow", 1.0),
        magnitude=rope.decimal("attention_factor", _magnitude(rope, factor)),
        whole=bool(rope.raw.get("truncate", True)),
    )


def _magnitude(rope: Settings, factor: float) -> float:
    """YaRN's own, or DeepSeek's quotient of two of it."""
    keys = ("mscale", "mscale_all_dim")
    if all(rope.raw.get(key) for key in keys):
        above, below = (yarn_magnitude(factor, rope.decimal(key)) for key in keys)
        return above / below
    return yarn_magnitude(factor)


ROPES: dict[str, Callable[[Settings, int], RopeScaling | None]] = {
    "default": lambda rope, length: None,
    "linear": lambda rope, length: LinearRope(rope.decimal("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}

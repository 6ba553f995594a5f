"""Model folders in Hugging Face's layout: config.json, tokenizer.json, one or several safetensors files."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.assets.model_folder import read_json, weight_files
from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import (
    DTYPES,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    longest_position,
    yarn_magnitude,
)
from fullstride.llm.families import FAMILIES, family_of
from fullstride.llm.families.family import FULL, SLIDING
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.text.tokenizer_folder import read_folder
from fullstride.llm.weights.canonical import canonical, check_count, check_heads, in_order, with_needed_windows
from fullstride.llm.weights.fp8_checkpoint import CODES, has_fp8, kv_cache_alone
from fullstride.llm.weights.fp8_checkpoint import joined as fp8_matrices
from fullstride.llm.weights.int4_checkpoint import int4_settings
from fullstride.llm.weights.int4_checkpoint import joined as int4_matrices
from fullstride.llm.weights.parameters import PLAIN, StoredParameter
from fullstride.llm.weights.rows import arranged
from fullstride.llm.weights.safetensors_file import open_safetensors
from fullstride.llm.weights.settings import CheckedSettings, checked_sampling, shortened
from fullstride.llm.weights.stacked_experts import take_apart

logger = logging.getLogger(__name__)

OUTER = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
INNER = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
LAYERS = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Old checkpoints hold these, which follow from the configuration.
DERIVED = "rotary_emb.inv_freq"
# Scales of a KV cache, as compressed-tensors, llm-compressor and ModelOpt name them: ours are each token's own.
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.kv_scale", "k_proj.k_scale",
    "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale")  # fmt: skip

# What other values would change the arithmetic: a key, and what it may be if it is there.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


def load_folder(folder: Path) -> tuple[ModelConfig, dict[str, StoredParameter], Tokenizer, dict[str, int | float]]:
    """Load a folder's configuration, mapped parameters, tokenizer and suggested sampling.

    Raises:
        ConfigError: if a file is missing, damaged, or of a model that the engine does not run.

    """
    config = read_config(folder)
    family = FAMILIES[config.architecture]
    stacks = family.stacked_experts
    int4 = int4_settings(folder / "config.json", read_json(folder / "config.json"))
    fp8 = has_fp8(folder / "config.json", read_json(folder / "config.json"))
    packed = {"U8": "uint8"} if stacks else {"I32": "int32"} if int4 else {CODES: "float8_e4m3fn"} if fp8 else {}
    if not (files := weight_files(folder)):
        raise ConfigError(f"{folder}: no *.safetensors; convert weights of other formats to safetensors or GGUF")
    tensors = {
        own: tensor
        for file in files
        for name, tensor in open_safetensors(file, packed).items()
        if (own := family.renamed(name)) is not None
    }
    if scales := [name for name in tensors if name.endswith(KV_SCALES)]:
        logger.info(
            "%s: %d scales of a KV cache are not read: an fp8 KV cache has each token's own", folder, len(scales)
        )
        tensors = {name: tensor for name, tensor in tensors.items() if name not in scales}
    check_count(folder, config, len(tensors), stacked=bool(stacks))
    experts, tensors = take_apart(folder, config, stacks, tensors)
    inner = layer_names(config)
    own = int4_matrices(folder, int4, tensors) if int4 else fp8_matrices(folder, tensors) if fp8 else tensors
    found: dict[str, StoredParameter] = experts | {
        canonical(name, LAYERS, inner, OUTER): tensor
        for name, tensor in own.items()
        if not (name.endswith(DERIVED) or (config.tied and name == "lm_head.weight"))
    }
    stored = in_order(folder, config, arranged(config, found))
    # What is packed is run in bfloat16, as the numbers of a GGUF are.
    config = replace(config, dtype="bfloat16" if int4 or fp8 else config.dtype or PLAIN[stored["embed"].kind])
    ends = folder / "generation_config.json"
    return config, stored, read_folder(folder), checked_sampling(ends, read_json(ends))


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return our names of a layer's tensors, by those of the files."""
    family = FAMILIES[config.architecture]
    experts = {
        theirs.format(i): f"experts.{i}.{ours}"
        for theirs, ours in family.expert_tensors.items()
        for i in range(config.experts)
    }
    return {**INNER, **family.tensors, **experts}


def read_config(folder: Path) -> ModelConfig:
    """The model's sizes, and its ends from generation_config.json where that says more; no dtype if it names none.

    Raises:
        ConfigError: if a size is missing, or the model is of a kind that the engine does not run.

    """
    file, ends = folder / "config.json", folder / "generation_config.json"
    raw = read_json(file)
    family = family_of(file, "model_type", raw.get("model_type"))
    raw = family.rewritten({**family.defaults, **raw})
    if int4_settings(file, raw) is not None or has_fp8(file, raw) or kv_cache_alone(raw):
        del raw["quantization_config"]
    settings = CheckedSettings(file, raw)
    for key, allowed in {**FIXED, **family.fixed}.items():
        if raw.get(key, allowed[0]) not in allowed:
            found = shortened(raw[key])
            raise ConfigError(f"{file}: {key}={found}: models with it are not supported, only {allowed[0]}")
    theta, scaling = _rope(settings)
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    bos = settings.ids("bos_token_id")
    fields = {
        "architecture": raw["model_type"],
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.size("intermediate_size"),
        "layers": settings.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": settings.size("num_key_value_heads", heads),
        "head_dim": settings.size("head_dim", hidden // heads),
        "max_position": longest_position(settings.size("max_position_embeddings"), scaling),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_eps": settings.decimal("rms_norm_eps", 1e-6),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias,
        "eos": CheckedSettings(ends, read_json(ends)).ids("eos_token_id") or settings.ids("eos_token_id"),
        "bos": bos[0] if bos else None,
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or ""),
    }
    config = ModelConfig(**{**fields, **family.layers(settings)})
    _check_types(settings, config)
    check_heads(file, config)
    if config.dtype:
        one_of(f"{file}: dtype", config.dtype, DTYPES)
    return with_needed_windows(config)


def _check_types(settings: CheckedSettings, config: ModelConfig) -> None:
    """Check that `layer_types`, if a file has them, say what the family's layers are."""
    found = settings.raw.get("layer_types")
    if found is None:
        return
    if not isinstance(found, list):
        raise ConfigError(f"{settings.file}: layer_types={shortened(found)}: expected a list")
    for i, kind in enumerate(found[: config.layers]):
        expected = FULL if config.window(i) is None else SLIDING
        if kind != expected:
            raise ConfigError(f"{settings.file}: layer_types[{i}]={shortened(kind)}: expected {expected}")


def _rope(settings: CheckedSettings) -> tuple[float, RopeScaling | None]:
    """Read the base theta and the RoPE scaling."""
    new, old = settings.inner("rope_parameters"), settings.inner("rope_scaling")
    if nested := [key for key, value in new.raw.items() if isinstance(value, dict)]:
        raise ConfigError(f"{settings.file}: rope_parameters.{nested[0]}: expected one RoPE for all layers")
    length = settings.size("max_position_embeddings")
    theta = new.decimal("rope_theta", old.decimal("rope_theta", settings.decimal("rope_theta", 10_000.0)))
    scaling = _scaling(new if new.raw else old, length)
    if new.raw and old.raw and (theta, scaling) != (old.decimal("rope_theta", theta), _scaling(old, length)):
        raise ConfigError(
            f"{settings.file}: rope_parameters={shortened(new.raw)} and rope_scaling={shortened(old.raw)}: expected one"
            " of them, or two that agree: keep the one that is meant"
        )
    return theta, scaling


def _scaling(rope: CheckedSettings, length: int) -> RopeScaling | None:
    kind = str(rope.raw.get("rope_type") or rope.raw.get("type") or "default")
    if kind not in ROPES:
        raise ConfigError(f"{rope.file}: rope_type={kind}: expected one of {', '.join(ROPES)}")
    if rope.raw.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"{rope.file}: partial_rotary_factor={rope.raw['partial_rotary_factor']}: expected 1")
    return ROPES[kind](rope, length)


def _llama3(rope: CheckedSettings, _: int) -> Llama3Rope:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if rope.raw.get(name) is None]:
        raise ConfigError(f"{rope.file}: the llama3 rope lacks {missing[0]}")
    low, high = rope.decimal("low_freq_factor"), rope.decimal("high_freq_factor")
    if low >= high:
        raise ConfigError(f"{rope.file}: low_freq_factor={low}: expected less than high_freq_factor, which is {high}")
    return Llama3Rope(rope.decimal("factor"), low, high, rope.size("original_max_position_embeddings"))


def _yarn(rope: CheckedSettings, length: int) -> YarnRope:
    factor = rope.decimal("factor")
    magnitude, keys = yarn_magnitude(factor), ("mscale", "mscale_all_dim")
    if all(rope.raw.get(key) for key in keys):  # DeepSeek's quotient of two of it
        above, below = (yarn_magnitude(factor, rope.decimal(key)) for key in keys)
        magnitude = above / below
    return YarnRope(
        factor,
        rope.size("original_max_position_embeddings", length),
        fast=rope.decimal("beta_fast", 32.0),
        slow=rope.decimal("beta_slow", 1.0),
        magnitude=rope.decimal("attention_factor", magnitude),
        whole=bool(rope.raw.get("truncate", True)),
    )


def _longrope(rope: CheckedSettings, length: int) -> LongRope:
    original = rope.size("original_max_position_embeddings", length)
    factors = rope.raw.get("short_factor")
    if not isinstance(factors, list) or not all(type(each) in (int, float) and 0 < each < math.inf for each in factors):
        raise ConfigError(f"{rope.file}: short_factor={shortened(factors)}: expected a list of positive numbers")
    factor = rope.decimal("factor", length / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(tuple(map(float, factors)), original, rope.decimal("attention_factor", magnitude))


ROPES: dict[str, Callable[[CheckedSettings, int], RopeScaling | None]] = {
    "default": lambda rope, length: None,
    "linear": lambda rope, length: LinearRope(rope.decimal("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

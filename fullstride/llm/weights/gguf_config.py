"""A GGUF's metadata as a configuration."""

import math

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.config import (
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    reach,
    yarn_magnitude,
)
from fullstride.llm.families import family_of
from fullstride.llm.weights.canonical import check_heads
from fullstride.llm.weights.gguf_file import GgufFile
from fullstride.llm.weights.settings import Settings, shortened, shortest

FREQUENCIES = "rope_freqs.weight"
# Llama 3.1 to 3.3's; a GGUF holds what follows from them, and not these.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(file: GgufFile) -> ModelConfig:
    """The model's sizes.

    Raises:
        ConfigError: if a size is missing, or the model is of a kind that the engine does not run.

    """
    sizes = _Sizes(file)
    heads, hidden = sizes.size("attention.head_count"), sizes.size("embedding_length")
    head_dim = sizes.size("attention.key_length", hidden // heads)
    theta = sizes.decimal("rope.freq_base", 10_000.0)
    _check(sizes, head_dim)
    scaling, length = _scaling(file, sizes, theta, head_dim), sizes.size("context_length")
    config = ModelConfig(
        architecture=sizes.architecture,
        vocab_size=_rows(file, "token_embd.weight"),
        hidden_size=hidden,
        intermediate_size=sizes.size("feed_forward_length"),
        layers=sizes.size("block_count"),
        heads=heads,
        kv_heads=sizes.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=reach(length, scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=sizes.decimal("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
        qk_norm=sizes.family.qk_norm,
        qkv_bias=sizes.family.qkv_bias,
        dtype=_dtype(file),
    )
    check_heads(file.path, config)
    return config


class _Sizes(Settings):
    """The keys that start with the architecture's name."""

    def __init__(self, file: GgufFile):
        name = file.metadata.get("general.architecture", "")
        self.family = family_of(file.path, "general.architecture", name)
        # What was joined has a count of 0.
        parts = file.metadata.get("split.count", 0)
        if not isinstance(parts, int) or isinstance(parts, bool):
            raise ConfigError(f"{file.path}: split.count={shortened(parts)}: expected a whole number")
        if parts > 1:
            raise ConfigError(f"{file.path}: one part of several; join them with llama.cpp's llama-gguf-split --merge")
        self.architecture, prefix = name, f"{name}."
        own = {key: value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(file.path, {key.removeprefix(prefix): value for key, value in own.items()}, prefix)

    def decimal(self, key: str, default: float | None = None) -> float:
        """Of what the file holds in float32."""
        return shortest(super().decimal(key, default))


def _check(sizes: _Sizes, head_dim: int) -> None:
    fixed = {
        "rope.scaling.type": (None, "none", "linear", "yarn"),
        "rope.scaling.attn_factor": (None, 1.0),
        "rope.scaling.yarn_attn_factor": (None, 1.0),
        "rope.scaling.yarn_ext_factor": (None, 1.0),
        "rope.scaling.yarn_log_multiplier": (None, 0.0),
        "rope.dimension_count": (None, head_dim),
        "attention.value_length": (None, head_dim),
        "attention.sliding_window": (None, 0),
        "expert_count": (None, 0),
    }
    for key, allowed in fixed.items():
        if (found := sizes.raw.get(key)) not in allowed:
            raise ConfigError(f"{sizes.file}: {sizes.architecture}.{key}={found}: models with it are not supported")


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ConfigError(f"{file.path}: has no tensor {name}")
    return file.tensors[name].shape[0]


def _dtype(file: GgufFile) -> str:
    """That of the first projection; packed numbers have none, and bfloat16 is what models are run in."""
    first = file.tensors.get("blk.0.attn_q.weight")
    return PLAIN_DTYPES.get(first.kind.name, "bfloat16") if first else "bfloat16"


def _scaling(file: GgufFile, sizes: _Sizes, theta: float, head_dim: int) -> RopeScaling | None:
    """As the metadata say it; Llama 3's is a tensor instead, of what each frequency is divided by."""
    kind = _kind(sizes, key := _factor_key(sizes))
    if kind == "none":
        return _llama3(file, theta, head_dim)
    if FREQUENCIES in file.tensors:
        raise ConfigError(
            f"{file.path}: {FREQUENCIES} beside {kind} RoPE: expected one of them; both are not supported"
        )
    factor = sizes.decimal(key)
    if kind == "linear":
        return LinearRope(factor)
    original = sizes.size("rope.scaling.original_context_length", sizes.size("context_length"))
    fast, slow = sizes.decimal("rope.scaling.yarn_beta_fast", 32.0), sizes.decimal("rope.scaling.yarn_beta_slow", 1.0)
    return YarnRope(factor, original, fast, slow, yarn_magnitude(factor))


def _factor_key(sizes: _Sizes) -> str:
    old = "rope.scale_linear"
    return old if old in sizes.raw and "rope.scaling.factor" not in sizes.raw else "rope.scaling.factor"


def _kind(sizes: _Sizes, key: str) -> str:
    """llama.cpp takes a factor that comes without a type as linear; a factor of 0 or 1 is none to it."""
    kind, factor = sizes.raw.get("rope.scaling.type"), sizes.raw.get(key)
    scaled = factor not in (None, 0, 1)
    if kind == "none" and scaled:
        raise ConfigError(
            f"{sizes.file}: {sizes.architecture}.{key}={factor} beside rope.scaling.type=none: expected no factor, or"
            " another type; mend the file's metadata"
        )
    return kind or ("linear" if scaled else "none")


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Llama3Rope | None:
    packed = file.tensors.get(FREQUENCIES)
    if packed is None:
        return None
    divisors = packed.data.view(np.float32).reshape(-1) if packed.kind.name == "F32" else np.zeros(0)
    rope = Llama3Rope(float(divisors.max(initial=1.0)), LOW, HIGH, ORIGINAL)
    if 2 * len(divisors) != head_dim or not np.allclose(divisors, _divisors(rope, theta, head_dim), rtol=1e-4):
        raise ConfigError(f"{file.path}: {FREQUENCIES} are not Llama 3's; other scaled RoPEs are not supported")
    return rope


def _divisors(rope: Llama3Rope, theta: float, head_dim: int) -> np.ndarray:
    turns = rope.original_max_position * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return 1 / ((1 - kept) / rope.factor + kept)

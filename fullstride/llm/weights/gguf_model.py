"""Loading of a GGUF file: configuration, canonical parameters and tokenizer."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import ConfigError, one_line
from fullstride.llm.config import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    longest_position,
    yarn_magnitude,
)
from fullstride.llm.families import FAMILIES, gguf_family
from fullstride.llm.packed.formats import CodedRows
from fullstride.llm.text.gguf_tokenizer import read_tokenizer
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.weights.canonical import canonical, check_count, check_heads, in_order, with_needed_windows
from fullstride.llm.weights.dequantize import dequantize
from fullstride.llm.weights.gguf_file import GgufFile, PackedTensor, open_gguf
from fullstride.llm.weights.packed_gguf import coded
from fullstride.llm.weights.parameters import PLAIN, StoredParameter, Values
from fullstride.llm.weights.rows import arranged
from fullstride.llm.weights.settings import CheckedSettings, gguf_sampling, shortened, shortest

FREQUENCIES = "rope_freqs.weight"
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
# Llama 3.1 to 3.3's; a GGUF holds what follows from them, and not these.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
# What some families scale, and how: other families must not.
SCALES = (
    "attention.scale", "embedding_scale", "residual_scale", "logit_scale", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
EMBEDDING = "token_embd.weight"
OUTER = {EMBEDDING: "embed", "output_norm.weight": "norm", "output.weight": "head"}
INNER = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
LAYERS = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class PackedRows:
    """Tensor of a GGUF file, dequantized when it is read.

    Attributes:
        order: for each row, its row in the file; None if they are the same.
        shift: what the file has added to it.

    """

    packed: PackedTensor
    order: np.ndarray | None = None
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.packed.shape

    @property
    def kind(self) -> str:
        """Type of its packed numbers."""
        return self.packed.kind.name

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part; of packed columns only the blocks that hold it are unpacked."""
        kind, data = self.packed.kind, self.packed.data
        if self.shift:
            return (dequantize(kind, data, np.dtype(np.float32))[0, rows] - np.float32(self.shift)).astype(dtype)
        if len(self.shape) == 1:
            return dequantize(kind, data, dtype)[0, rows]
        data = data[rows] if self.order is None else data[self.order[rows]]
        first, last = columns.start // kind.numbers, -(-columns.stop // kind.numbers)
        part = dequantize(kind, data[:, first * kind.size : last * kind.size], dtype)
        skipped = first * kind.numbers
        return part[:, columns.start - skipped : columns.stop - skipped]

    def codes(self, rows: slice, columns: slice) -> CodedRows | None:
        """A part of a matrix as codes; None for a type without a packed format.

        Raises:
            ConfigError: if the columns begin or end within a block.

        """
        kind = self.packed.kind
        if columns.start % kind.numbers or columns.stop % kind.numbers:
            part = f"numbers {columns.start} to {columns.stop} of its rows"
            raise ConfigError(f"{part} are not whole blocks of {kind.numbers} in {kind.name}")
        data = self.packed.data[rows] if self.order is None else self.packed.data[self.order[rows]]
        first, last = columns.start // kind.numbers, columns.stop // kind.numbers
        return coded(kind.name, data[:, first * kind.size : last * kind.size])


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, StoredParameter], Tokenizer, dict[str, int | float]]:
    """Load a GGUF file's configuration, mapped parameters, tokenizer and suggested sampling.

    Raises:
        ConfigError: if it is damaged, or of a model that the engine does not run.

    """
    try:
        file = open_gguf(path)
        config = read_config(file)
        family = FAMILIES[config.architecture]
        check_count(path, config, len(file.tensors), stacked=True)
        inner = {theirs: ours for theirs, ours in {**INNER, **family.gguf_tensors}.items() if ours}
        found: dict[str, StoredParameter] = {}
        for name, packed in file.tensors.items():
            ours = canonical(name, LAYERS, inner, OUTER)
            order = _order(ours, packed.shape, config.head_dim) if family.interleaved else None
            if name != FREQUENCIES and not (name in (SHORT, LONG) and isinstance(config.rope_scaling, LongRope)):
                shift = config.norm_offset if "norm" in ours.rpartition(".")[2] else 0.0
                found |= {each: PackedRows(part, order, shift) for each, part in _experts(ours, packed).items()}
        stored, tokenizer = in_order(path, config, arranged(config, found)), read_tokenizer(path, file.metadata)
        return config, stored, tokenizer, gguf_sampling(path, file.metadata)
    except ConfigError as error:
        # Names and values are the file's own, and may have line ends.
        raise ConfigError(one_line(error)) from error


def _experts(name: str, packed: PackedTensor) -> dict[str, PackedTensor]:
    """Take apart the matrices, or biases, of all experts, which are in one tensor; another tensor stays as it is."""
    layer, experts, part = name.partition(".experts.")
    if not experts or len(packed.shape) not in (2, 3):
        return {name: packed}
    data = packed.data.reshape(packed.shape[0], -1, packed.data.shape[-1])
    return {
        f"{layer}.experts.{i}.{part}": PackedTensor(packed.name, packed.kind, packed.shape[1:], own)
        for i, own in enumerate(data)
    }


def _order(name: str, shape: tuple[int, ...], head_dim: int) -> np.ndarray | None:
    """llama.cpp rotates neighbours in some families' heads, so there the two halves of a head lie interleaved."""
    if not name.endswith((".q", ".k")) or shape[0] % head_dim:
        return None
    rows = np.arange(shape[0]).reshape(-1, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


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
    if EMBEDDING not in file.tensors:
        raise ConfigError(f"{file.path}: has no tensor {EMBEDDING}")
    # That of the first projection; packed numbers have none, and bfloat16 is what models are run in.
    first = file.tensors.get("blk.0.attn_q.weight") or file.tensors.get("blk.0.attn_qkv.weight")
    scaling, length = _scaling(file, sizes, theta, head_dim), sizes.size("context_length")
    fields: dict[str, Any] = {
        "architecture": sizes.ours,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": sizes.size("feed_forward_length"),
        "layers": sizes.size("block_count"),
        "heads": heads,
        "kv_heads": sizes.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position": longest_position(length, scaling),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_eps": sizes.decimal("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in file.tensors,
        "qk_norm": sizes.family.qk_norm,
        "qkv_bias": sizes.family.qkv_bias,
        "dtype": PLAIN.get(first.kind.name, "bfloat16") if first else "bfloat16",
    }
    config = ModelConfig(**{**fields, **sizes.family.gguf_layers(sizes, _factors(file))})
    check_heads(file.path, config)
    _check_experts(file, config)
    return with_needed_windows(config)


class _Sizes(CheckedSettings):
    """Settings whose keys start with the architecture's name."""

    def __init__(self, file: GgufFile):
        name = file.metadata.get("general.architecture", "")
        experts = file.metadata.get(f"{name}.expert_count", 0)
        self.ours, self.family = gguf_family(file.path, name, experts not in (0, None))
        # A joined file has a count of 0.
        parts = file.metadata.get("split.count", 0)
        if not isinstance(parts, int) or isinstance(parts, bool):
            raise ConfigError(f"{file.path}: split.count={shortened(parts)}: expected a whole number")
        if parts > 1:
            raise ConfigError(
                f"{file.path}: one part of a split model; join the parts with llama.cpp's llama-gguf-split --merge"
            )
        self.architecture, prefix = name, f"{name}."
        own = {key: value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(file.path, {key.removeprefix(prefix): value for key, value in own.items()}, prefix)

    def decimal(self, key: str, default: float | None = None) -> float:
        """Return the shortest decimal of a number that the file stores as float32."""
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
        "expert_weights_scale": (None, 0.0, 1.0),
        "expert_weights_norm": (None, True),
        "expert_gating_func": (None, 0, 1),
        "expert_shared_count": (None, 0),
        "attention.clamp_kqv": (None, 0.0),
        "attention.sliding_window_pattern": (None,),
        "rope.freq_base_swa": (None,),
        **dict.fromkeys(SCALES, (None,)),
    }
    for key, allowed in fixed.items():
        if key not in sizes.family.gguf_keys and (found := sizes.raw.get(key)) not in allowed:
            raise ConfigError(f"{sizes.file}: {sizes.architecture}.{key}={found}: models with it are not supported")


def _check_experts(file: GgufFile, config: ModelConfig) -> None:
    """Check the number of experts before any list of them is made."""
    name = "blk.0.ffn_gate_exps.weight"
    found = file.tensors[name].shape[0] if name in file.tensors else 0
    if config.experts and found != config.experts:
        raise ConfigError(f"{file.path}: {config.experts} experts are configured, but {name} is of {found}")


def _factors(file: GgufFile) -> tuple[float, ...]:
    """Return the factors of LongRoPE for sequences up to the original length.

    Raises:
        ConfigError: if they are not in F32.

    """
    packed = file.tensors.get(SHORT)
    if packed is None:
        return ()
    if packed.kind.name != "F32":
        raise ConfigError(f"{file.path}: {SHORT} is of {packed.kind.name}: expected F32")
    return tuple(shortest(value) for value in packed.data.view(np.float32).reshape(-1).tolist())


def _scaling(file: GgufFile, sizes: _Sizes, theta: float, head_dim: int) -> RopeScaling | None:
    """Read the RoPE scaling from the metadata; Llama 3's is a tensor of divisors of the frequencies instead."""
    old, key = "rope.scale_linear", "rope.scaling.factor"
    key = old if old in sizes.raw and key not in sizes.raw else key
    kind, factor = sizes.raw.get("rope.scaling.type"), sizes.raw.get(key)
    # llama.cpp takes a factor that comes without a type as linear; a factor of 0 or 1 is none to it.
    scaled = factor not in (None, 0, 1)
    if kind == "none" and scaled:
        raise ConfigError(
            f"{sizes.file}: {sizes.architecture}.{key}={factor} beside rope.scaling.type=none: expected no factor, or"
            " another type; mend the file's metadata"
        )
    kind = kind or ("linear" if scaled else "none")
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
    return YarnRope(factor, original, fast, slow, yarn_magnitude(factor), whole=sizes.family.gguf_whole_ramp)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Llama3Rope | None:
    packed = file.tensors.get(FREQUENCIES)
    if packed is None:
        return None
    divisors = packed.data.view(np.float32).reshape(-1) if packed.kind.name == "F32" else np.zeros(0)
    rope = Llama3Rope(float(divisors.max(initial=1.0)), LOW, HIGH, ORIGINAL)
    turns = ORIGINAL * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - LOW) / (HIGH - LOW), 0, 1)
    expected = 1 / ((1 - kept) / rope.factor + kept)
    if len(divisors) != len(expected) or not np.allclose(divisors, expected, rtol=1e-4):
        raise ConfigError(f"{file.path}: {FREQUENCIES} are not Llama 3's; other scaled RoPEs are not supported")
    return rope

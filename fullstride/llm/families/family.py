"""Description of a model family; all are decoders of RMSNorm, gated MLPs, RoPE and GQA."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fullstride.errors import ConfigError, shortened
from fullstride.llm.families.words import PreTokenizer

# Of a model; its layers are listed one by one.
MOST_LAYERS = 4096
SLIDING, FULL = "sliding_attention", "full_attention"


@runtime_checkable
class FileSettings(Protocol):
    """Values of a file's configuration, as `fullstride.llm.weights.settings.CheckedSettings` has them."""

    file: Path
    raw: dict[str, Any]

    def size(self, key: str, default: int | None = None) -> int: ...
    def decimal(self, key: str, default: float | None = None) -> float: ...
    def inner(self, key: str) -> "FileSettings": ...


def _unchanged(found: Any) -> Any:
    return found


def _nothing(settings: FileSettings) -> dict[str, Any]:
    return {}


def _nothing_more(settings: FileSettings, factors: tuple[float, ...]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """Model family: a row of `FAMILIES`, under the name in config.json.

    Attributes:
        qk_norm: whether queries and keys are normalized before RoPE.
        qkv_bias: whether the three projections have biases.
        interleaved: whether a GGUF interleaves the two halves of a head's rows of q and k, as llama.cpp does.
        fixed: keys of config.json that would change the arithmetic, and what they may be if they are there, beside
            those of `fullstride/llm/weights/hf_folder.py`, before which they go.
        defaults: values of keys that a config.json lacks, if transformers takes others than it does for Llama.
        rewritten: config.json in the words of Llama's.
        renamed: name of a tensor, or an adapter's module, in the words of Llama's; None for one that is not read.
        layers: further fields of a `ModelConfig`, from config.json; `windows` may be all None.
        tensors: our names of a layer's tensors by those of Hugging Face, in addition to the common ones.
        expert_tensors: our names of an expert's matrices by those of Hugging Face, with {} for the expert's number.
        stacked_experts: our names of the parts of a layer's tensors that hold a matrix, or its bias, of all experts, by
            those of Hugging Face: rows of several parts take turns; see `fullstride.llm.weights.stacked_experts`.
        gguf_tensors: our names of a layer's tensors by those of llama.cpp, in place of the common ones; None for a
            common name that it does not have.
        gguf: its name in GGUF files; empty if those are not read.
        gguf_whole_ramp: whether the ramp of a GGUF's YaRN begins and ends at whole pairs, which the file does not say.
        gguf_keys: keys of a GGUF that `gguf_layers` reads, and that other families must not have.
        gguf_layers: further fields of a `ModelConfig`, from a GGUF's metadata without the architecture's name, and from
            the factors of LongRoPE, if there are any.
        words: pre-tokenizers of its tokenizers, by llama.cpp's names.
        ends: special tokens that end an answer.

    """

    qk_norm: bool = False
    qkv_bias: bool = False
    interleaved: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rewritten: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    renamed: Callable[[str], str | None] = _unchanged
    layers: Callable[[FileSettings], dict[str, Any]] = _nothing
    tensors: Mapping[str, str] = field(default_factory=dict)
    expert_tensors: Mapping[str, str] = field(default_factory=dict)
    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str | None] = field(default_factory=dict)
    gguf: str = ""
    gguf_whole_ramp: bool = True
    gguf_keys: frozenset[str] = frozenset()
    gguf_layers: Callable[[FileSettings, tuple[float, ...]], dict[str, Any]] = _nothing_more
    words: Mapping[str, PreTokenizer] = field(default_factory=dict)
    ends: tuple[str, ...] = ()


def layer_count(settings: FileSettings) -> int:
    """Return the number of layers.

    Raises:
        ConfigError: if there are more than can be listed.

    """
    count = settings.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"{settings.file}: num_hidden_layers={count}: expected at most {MOST_LAYERS}")
    return count


def all_windows(settings: FileSettings) -> tuple[int | None, ...]:
    """Return the window of each layer if all have that of `sliding_window`."""
    window = settings.size("sliding_window") if settings.raw.get("sliding_window") is not None else None
    return (window,) * layer_count(settings)


def mixed_windows(settings: FileSettings, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`; without them, the last of each `period` layers has none.

    Raises:
        ConfigError: if `layer_types` is not one of two words for each layer.

    """
    count = layer_count(settings)
    types = settings.raw.get("layer_types")
    if types is None:
        types = [SLIDING if (i + 1) % period else FULL for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(kind not in (SLIDING, FULL) for kind in types):
        expected = f"{SLIDING} or {FULL} for each of {count} layers"
        raise ConfigError(f"{settings.file}: layer_types={shortened(str(types), 80)}: expected {expected}")
    return tuple(settings.size("sliding_window") if kind == SLIDING else None for kind in types)


def experts_of(settings: FileSettings, key: str) -> dict[str, Any]:
    """Return the number of experts, which a file has under a key, and how many of them a token takes.

    Raises:
        ConfigError: if it takes more than there are.

    """
    experts, taken = settings.size(key), settings.size("num_experts_per_tok")
    if taken > experts:
        raise ConfigError(f"{settings.file}: num_experts_per_tok={taken}: expected at most {experts}, the experts")
    return {"experts": experts, "experts_per_token": taken}


def gguf_experts(settings: FileSettings) -> dict[str, Any]:
    """Return the experts of a GGUF whose chosen probabilities are divided by their sum, as llama.cpp does for all.

    Raises:
        ConfigError: if a token takes more than there are.

    """
    experts, taken = settings.size("expert_count"), settings.size("expert_used_count")
    if taken > experts:
        raise ConfigError(f"{settings.file}: expert_used_count={taken}: expected at most {experts}, the experts")
    inner = settings.size("expert_feed_forward_length", settings.size("feed_forward_length"))
    return {"experts": experts, "experts_per_token": taken, "shared_weights": True, "intermediate_size": inner}


GGUF_EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
GGUF_EXPERT_TENSORS = {
    "ffn_gate_inp.weight": "router",
    **{f"ffn_{name}_exps.weight": f"experts.{name}" for name in ("gate", "up", "down")},
    **{f"ffn_{name}.weight": None for name in ("gate", "up", "down")},
}


def optional(settings: FileSettings, key: str) -> float | None:
    """Return a positive number, or None if the file has null."""
    return None if settings.raw.get(key) is None else settings.decimal(key)

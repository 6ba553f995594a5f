"""LoRA adapters (arXiv:2106.09685) in PEFT's form: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fullstride.errors import ConfigError, shortened
from fullstride.llm.config import FUSED, ModelConfig, parameter_shapes
from fullstride.llm.text.tokenizer_folder import read_json
from fullstride.llm.weights.canonical import listed
from fullstride.llm.weights.hf_folder import LAYERS, layer_names
from fullstride.llm.weights.rows import rotary_order
from fullstride.llm.weights.safetensors_file import open_safetensors
from fullstride.llm.weights.settings import CheckedSettings

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = ("qkv", "o", "gate_up", "down")
FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Keys that are read below, or that say how the adapter was trained and not what it computes.
READ = frozenset((
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "bias", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "task_type",
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core", "runtime_config",
))  # fmt: skip
# What other values would change the arithmetic; other initial values change the model's own weights as well.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
# What every dtype holds: an adapter's factor times the zeros of other rows has to be zero.
LARGEST = 6e4
NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


class LowRank(NamedTuple):
    """Update b a of one matrix, fp32; the adapter's scale is in b."""

    a: Float[np.ndarray, "rank inner"]
    b: Float[np.ndarray, "out rank"]


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter of a model.

    Attributes:
        path: folder that it was read from.
        rank: largest rank of its updates.
        updates: by parameters' names, such as `layers.0.q`; also `layers.0.qkv` if the model's files have one matrix.

    """

    path: Path
    rank: int
    updates: Mapping[str, LowRank]

    def fused(self, config: ModelConfig, layer: int, name: str, rank: int) -> LowRank:
        """Return the update of a matrix of a layer as the engine has it, zeros if there is none.

        Args:
            config: configuration of the model.
            layer: number of the layer.
            name: one of `PROJECTIONS`; the parts of a fused one each have `rank` columns of their own.
            rank: rank to pad to.

        """
        parts, shapes = FUSED.get(name, (name,)), parameter_shapes(config)
        sizes = [shapes[f"layers.{layer}.{part}"] for part in parts]
        ends = np.cumsum([rows for rows, _ in sizes])
        a = np.zeros((len(parts) * rank, sizes[0][1]), np.float32)
        b = np.zeros((int(ends[-1]), len(parts) * rank), np.float32)
        places = {
            part: slice(int(end) - rows, int(end)) for part, end, (rows, _) in zip(parts, ends, sizes, strict=True)
        }
        for i, (part, rows) in enumerate({name: slice(None), **places}.items()):
            if (own := self.updates.get(f"layers.{layer}.{part}")) is not None:
                first = rank * max(0, i - 1)
                a[first : first + len(own.a)] = own.a
                b[rows, first : first + len(own.a)] = own.b
        if config.rotary_dim not in (None, config.head_dim):
            for part in {"q", "k"} & places.keys():
                own_rows = b[places[part]]
                b[places[part]] = own_rows[rotary_order(config, len(own_rows))]
        return LowRank(a, b)


def read_adapter(folder: str | Path, config: ModelConfig) -> Adapter:
    """Read an adapter and check that it is one of this model.

    Raises:
        ConfigError: if a file is missing or damaged, the adapter is of another kind, or does not fit the model.

    """
    path = Path(folder).expanduser()
    settings, file = CheckedSettings(path / SETTINGS, read_json(path / SETTINGS)), path / TENSORS
    if not settings.raw:
        raise ConfigError(f"adapter {path}: no {SETTINGS}: expected a folder as PEFT's save_pretrained writes it")
    if not file.is_file():
        raise ConfigError(f"adapter {path}: no {TENSORS}; save the adapter with safe_serialization=True")
    _check(settings)
    factors = _factors(file, config)
    updates = {name: _update(settings, file, config, name, *own) for name, own in factors.items()}
    if not updates:
        raise ConfigError(f"{file}: no tensors: expected lora_A and lora_B of at least one projection")
    return Adapter(path, max(len(update.a) for update in updates.values()), updates)


def _check(settings: CheckedSettings) -> None:
    for key, allowed in FIXED.items():
        if (found := settings.raw.get(key, allowed[0])) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ConfigError(f"{settings.file}: {key}={shortened(str(found), 80)}: expected {expected}")
    for key, value in settings.raw.items():
        if key not in READ and value not in NOTHING:
            found = shortened(str(value), 80)
            raise ConfigError(f"{settings.file}: {key}={found}: adapters with it are not supported, only without it")


def _factors(file: Path, config: ModelConfig) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Return by our names of the adapted parameters their modules' names and both factors.

    Raises:
        ConfigError: listing tensors that are of no projection, or a factor whose other one is missing.

    """
    names, shapes = layer_names(config), parameter_shapes(config)
    able = {part for name in PROJECTIONS for part in (name, *FUSED.get(name, ()))}
    halves: dict[str, dict[str, Any]] = {}
    modules, others = {}, []
    for name, tensor in open_safetensors(file).items():
        found = FACTOR.fullmatch(name)
        layer = LAYERS.fullmatch(f"{found[1]}.weight") if found else None
        part = names.get(layer[2]) if layer else None
        ours = f"layers.{int(layer[1])}.{part}" if layer else ""
        first = f"layers.{int(layer[1])}.{FUSED.get(part or '', (part,))[0]}" if layer else ""
        if found is None or part not in able or first not in shapes:
            others.append(name)
            continue
        halves.setdefault(ours, {})[found[2]] = tensor.values.astype(np.float32)
        modules[ours] = found[1]
    if others:
        expected = "lora_A and lora_B of projections of attention and MLP in the model's layers"
        raise ConfigError(f"{file}: has {listed(others)}: expected only {expected}")
    if lonely := [modules[name] for name, own in halves.items() if len(own) < 2]:
        raise ConfigError(f"{file}: {listed(lonely)}: expected both lora_A and lora_B")
    return {name: (modules[name], own["A"], own["B"]) for name, own in halves.items()}


def _update(
    settings: CheckedSettings, file: Path, config: ModelConfig, name: str, module: str, a: np.ndarray, b: np.ndarray
) -> LowRank:
    rank = _setting(settings, "rank_pattern", module, settings.size("r", 8))
    alpha = _setting(settings, "alpha_pattern", module, settings.decimal("lora_alpha", 8.0))
    layer, _, part = name.rpartition(".")
    sizes = [parameter_shapes(config)[f"{layer}.{each}"] for each in FUSED.get(part, (part,))]
    expected = ((rank, sizes[0][1]), (sum(rows for rows, _ in sizes), rank))
    if (a.shape, b.shape) != expected:
        found = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
        raise ConfigError(f"{file}: {module} has {found}: expected {list(expected[0])} and {list(expected[1])}")
    b = b * np.float32(alpha / (math.sqrt(rank) if settings.raw.get("use_rslora") else rank))
    if not all((np.abs(factor) <= LARGEST).all() for factor in (a, b)):
        raise ConfigError(f"{file}: {module} has values that are not finite, or larger than {LARGEST:g} when scaled")
    return LowRank(a, b)


def _setting(settings: CheckedSettings, key: str, module: str, default: Any) -> Any:
    """Return a module's own rank or alpha: that of the first pattern that its name ends with."""
    patterns = settings.inner(key)
    for pattern in patterns.raw:
        if not re.fullmatch(r"[\w.]+", pattern):
            raise ConfigError(f"{settings.file}: {key} has {shortened(pattern, 80)}: expected names of modules")
        if module == pattern or module.endswith(f".{pattern}"):
            return patterns.size(pattern) if isinstance(default, int) else patterns.decimal(pattern)
    return default

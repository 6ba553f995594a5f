"""Canonical names of a file's tensors, and the check that the model is complete."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.llm.config import FAR, LongRope, ModelConfig, parameter_shapes
from fullstride.llm.weights.parameters import StoredParameter

SHOWN = 5


def canonical(name: str, layers: re.Pattern[str], inner: Mapping[str, str], outer: Mapping[str, str]) -> str:
    """Return the canonical name of a tensor; its own name if it has none.

    Args:
        name: name in the file.
        layers: pattern of a layer's tensors, with the layer's number and the rest of the name as groups.
        inner: canonical names by that rest.
        outer: canonical names of tensors outside the layers.

    """
    layer = layers.fullmatch(name)
    return f"layers.{layer[1]}.{inner[layer[2]]}" if layer and layer[2] in inner else outer.get(name, name)


def in_order(path: Path, config: ModelConfig, found: Mapping[str, StoredParameter]) -> dict[str, StoredParameter]:
    """Return exactly the model's parameters, in the order of `parameter_shapes`.

    Raises:
        ConfigError: listing what is missing, unexpected or of another shape.

    """
    shapes = parameter_shapes(config)
    wrong = {
        "missing": [name for name in shapes if name not in found],
        "unexpected": [name for name in found if name not in shapes],
        "of another shape": [
            f"{name} {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in found and tuple(found[name].shape) != shape
        ],
    }
    if any(wrong.values()):
        kinds = "; ".join(f"{kind}: {listed(names)}" for kind, names in wrong.items() if names)
        raise ConfigError(f"{path}: these parameters are not a {config.architecture} model's as configured: {kinds}")
    return {name: found[name] for name in shapes}


def check_count(path: Path, config: ModelConfig, count: int, stacked: bool = False) -> None:
    """Check that a file has a tensor for each layer, and for each expert if they are not `stacked` in one.

    Raises:
        ConfigError: if it does not, before all names are listed.

    """
    if config.layers > count:
        raise ConfigError(f"{path}: {config.layers} layers are configured, but the file has only {count} tensors")
    if not stacked and config.layers * config.experts > count:
        experts = f"{config.layers} layers of {config.experts} experts"
        raise ConfigError(f"{path}: {experts} are configured, but the file has only {count} tensors")


def listed(names: list[str]) -> str:
    """Format the first few names, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def with_needed_windows(config: ModelConfig) -> ModelConfig:
    """Leave out windows that hide no token, being as long as the context, unless they tell which layers' RoPE differs.

    Kernel sets that know no windows can run a model without.
    """
    if config.window_theta is not None and any(config.windows):
        return config
    needed = tuple(None if window is None or window >= config.max_position else window for window in config.windows)
    return replace(config, windows=needed if any(needed) else (), window_theta=None)


def check_heads(path: Path, config: ModelConfig) -> None:
    """Check that query heads share key heads evenly, that heads have an even size, and the context length.

    Raises:
        ConfigError: if they do not.

    """
    if config.heads % config.kv_heads:
        raise ConfigError(f"{path}: {config.heads} query heads cannot share {config.kv_heads} key heads evenly")
    if config.max_position >= FAR:
        raise ConfigError(f"{path}: its context, scaled, has {config.max_position} tokens or more: expected below 2^31")
    if config.head_dim % 2:
        raise ConfigError(f"{path}: head_dim is {config.head_dim}, expected an even number for RoPE")
    rotated, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    if rotated % 2 or rotated > config.head_dim:
        most = f"an even number, at most head_dim, which is {config.head_dim}"
        raise ConfigError(f"{path}: {rotated} elements of a head are rotated: expected {most}")
    if isinstance(scaling, LongRope) and len(scaling.factors) != rotated // 2:
        raise ConfigError(f"{path}: short_factor has {len(scaling.factors)} numbers: expected {rotated // 2}")

"""Construction of an engine's parts from a model, its settings and the devices."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.pool import block_bytes
from fullstride.llm.engine.shapes import CompiledShapes, check, choose_shapes, dtype_for, pool_for
from fullstride.llm.kernels import choose, shared
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.models.adapters import empty_slots
from fullstride.llm.models.parameters import put
from fullstride.llm.models.tensor_parallel import refusal
from fullstride.llm.progress import OnProgress

logger = logging.getLogger(__name__)


@runtime_checkable
class Model(Protocol):
    """Protocol of `fullstride.llm.weights.LoadedModel`; an engine whose tokenizer is None gives no text."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...

    @property
    def tokenizer(self) -> Any: ...


class EngineParts(NamedTuple):
    """Devices of an engine, the kernels chosen for them, the weights on them, and the shapes to compile."""

    devices: tuple[Any, ...]
    kernels: Kernels
    weights: Any
    sizes: CompiledShapes


def select_kernels(
    model: ModelConfig, config: EngineConfig, devices: Sequence[Any] | None = None
) -> tuple[tuple[Any, ...], str, Kernels]:
    """Choose an engine's devices, dtype and kernels; nothing is read, put on a device or compiled.

    Args:
        model: sizes.
        config: settings.
        devices: JAX devices, `tensor_parallel_size` of them; None for the first ones.

    Returns:
        The devices, the dtype of the weights, and the kernels.

    Raises:
        ConfigError: if there are too few devices, or another number than that was given; if the model cannot be split
            among them; or the kernel set cannot run it on them; and as
            `fullstride.llm.engine.shapes.check`.

    """
    count = config.tensor_parallel_size
    found = tuple(jax.devices()[:count] if devices is None else devices)
    if len(found) != count:
        there = f"there are {len(found)} devices" if devices is None else f"{len(found)} devices were passed"
        raise ConfigError(f"tensor_parallel_size={count}: {there}; expected as many devices as share the model")
    if (reason := refusal(model, count)) is not None:
        raise ConfigError(f"tensor_parallel_size={count}: {reason}")
    dtype = dtype_for(config, found[0].platform, model.dtype)
    check(config, model, found[0].platform, dtype)
    pool = pool_for(config, dtype)
    kernels = choose(
        config.kernels, model, dtype, config.block_size, found[0], count, pool, adapters=config.max_loras > 0
    )
    return found, dtype, kernels


def build_parts(
    loaded: Model, config: EngineConfig, devices: Sequence[Any] | None, loading: OnProgress | None = None
) -> EngineParts:
    """Choose kernels and shapes, and put the weights on the devices.

    Args:
        loaded: the model.
        config: settings.
        devices: JAX devices, `tensor_parallel_size` of them; None for the first ones.
        loading: called with how many of how many layers are on the devices.

    Raises:
        ConfigError: for settings that the model or the devices cannot meet.

    """
    model = loaded.config
    found, dtype, kernels = select_kernels(model, config, devices)
    kernels = shared(kernels, found)
    weights = put(model, loaded.parameters, dtype, *found, loading=loading)
    if config.max_loras:
        slots = empty_slots(model, config.max_loras, config.max_lora_rank, dtype, *found)
        layers = (layer._replace(adapters=own) for layer, own in zip(weights.layers, slots, strict=True))
        weights = weights._replace(layers=tuple(layers))
    if kernels.fused_step is not None:
        weights = weights._replace(packed=kernels.fused_step.pack(weights))
    made = choose_shapes(config, model, kernels, *found)
    _say(config, model, made)
    return EngineParts(found, kernels, weights, made)


def _say(config: EngineConfig, model: ModelConfig, made: CompiledShapes) -> None:
    """Log the chosen sizes; warn if sequences are shorter than the model's context without a setting that says so."""
    taken = block_bytes(model, made.pool, made.block) * (made.blocks + 1)
    groups = f" in one of {len(made.windows)} groups of layers" * (len(made.windows) > 1)
    said = f"max_length={made.max_length}, {made.blocks} blocks of {made.block} tokens{groups}, {taken / 1e6:,.0f} MB"
    free = not (config.max_length or config.kv_blocks or config.kv_memory or config.kv_share)
    if free and made.max_length < model.max_position:
        advice = "set kv_memory, kv_share or max_length to change that; kv_cache_dtype=fp8 needs less memory"
        logger.warning("%s: the model supports %d tokens; %s", said, model.max_position, advice)
    else:
        logger.info("%s", said)

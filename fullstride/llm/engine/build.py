"""Construction of an engine's parts from a model, its settings and the devices."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.pool import free_memory, pool_bytes
from fullstride.llm.engine.shapes import CompiledShapes, check, choose_shapes, dtype_for, pool_for
from fullstride.llm.kernels import choose, shared
from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.models.adapters import empty_slots
from fullstride.llm.models.packing import STORED, Packing, weight_bytes
from fullstride.llm.models.packing import refusal as unpackable
from fullstride.llm.models.parameters import put
from fullstride.llm.models.tensor_parallel import refusal
from fullstride.llm.progress import OnProgress

logger = logging.getLogger(__name__)

# Of the free memory: weights that would take more stay as their files pack them.
AUTO_SHARE = 0.7


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
    """Devices of an engine, the kernels for them, the weights and how they are packed, and the shapes to compile."""

    devices: tuple[Any, ...]
    kernels: Kernels
    weights: Any
    sizes: CompiledShapes
    quantize: str


@runtime_checkable
class PackedFiles(Protocol):
    """Protocol of parameters whose files may pack them, such as `fullstride.llm.weights.Parameters`."""

    def packed_as(self, name: str) -> str | None: ...


def select_kernels(
    model: ModelConfig, config: EngineConfig, devices: Sequence[Any] | None = None, quantize: str | None = None
) -> tuple[tuple[Any, ...], str, Kernels]:
    """Choose an engine's devices, dtype and kernels; nothing is read, put on a device or compiled.

    Args:
        model: sizes.
        config: settings.
        devices: JAX devices, `tensor_parallel_size` of them; None for the first ones.
        quantize: what `quantize` is if the settings leave it to `auto`.

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
    quantize = quantize or config.quantize
    packed = quantize not in ("auto", "none")
    if packed and (reason := unpackable(model, dtype, quantize)) is not None:
        raise ConfigError(reason)
    kernels = choose(
        config.kernels,
        model,
        dtype,
        config.block_size,
        found[0],
        count,
        pool,
        adapters=config.max_loras > 0,
        packed=packed,
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
    quantize = _quantize(loaded, config, devices)
    found, dtype, kernels = select_kernels(model, config, devices, quantize)
    kernels = shared(kernels, found)
    packing = None if quantize == "none" else Packing(quantize, kernels.tiled)
    weights = put(model, loaded.parameters, dtype, *found, packing=packing, loading=loading)
    if packing is not None:
        taken = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        logger.info("quantize=%s: the weights take %s MB", quantize, f"{taken / 1e6:,.0f}")
    if config.max_loras:
        slots = empty_slots(model, config.max_loras, config.max_lora_rank, dtype, *found)
        layers = (layer._replace(adapters=own) for layer, own in zip(weights.layers, slots, strict=True))
        weights = weights._replace(layers=tuple(layers))
    if kernels.fused_step is not None:
        weights = weights._replace(packed=kernels.fused_step.pack(weights))
    made = choose_shapes(config, model, kernels, *found)
    _say(config, model, made)
    return EngineParts(found, kernels, weights, made, quantize)


def _quantize(loaded: Model, config: EngineConfig, devices: Sequence[Any] | None) -> str:
    """Return the packing of the weights; `auto` keeps them packed if they would otherwise take most of the memory.

    Raises:
        ConfigError: for `stored` if the model's files pack nothing.

    """
    files = loaded.parameters
    held = {files.packed_as(name) for name in files} - {None} if isinstance(files, PackedFiles) else set()
    if config.quantize == STORED and not held:
        raise ConfigError("quantize=stored: the model's files have no packed weights; take fp8, int8 or int4")
    if config.quantize != "auto":
        return config.quantize
    share = jax.devices()[: config.tensor_parallel_size] if devices is None else devices
    dtype, free = dtype_for(config, share[0].platform, loaded.config.dtype), free_memory(share)
    whole = weight_bytes(loaded.config, dtype, lambda _: None)
    if not held or free is None or whole <= AUTO_SHARE * free or unpackable(loaded.config, dtype, STORED):
        return "none"
    room = f"{whole / 1e9:.1f} GB of weights in {dtype} and {free / 1e9:.1f} GB of free memory"
    logger.warning("quantize=stored was chosen for %s", room)
    return STORED


def _say(config: EngineConfig, model: ModelConfig, made: CompiledShapes) -> None:
    """Log the chosen sizes; warn if sequences are shorter than the model's context without a setting that says so."""
    taken = pool_bytes(model, made.pool, made.block, made.blocks)
    groups = f" in one of {len(made.windows)} groups of layers" * (len(made.windows) > 1)
    said = f"max_length={made.max_length}, {made.blocks} blocks of {made.block} tokens{groups}, {taken / 1e6:,.0f} MB"
    free = not (config.max_length or config.kv_blocks or config.kv_memory or config.kv_share)
    if free and made.max_length < model.max_position:
        advice = "set kv_memory, kv_share or max_length to change that; kv_cache_dtype=fp8 needs less memory"
        logger.warning("%s: the model supports %d tokens; %s", said, model.max_position, advice)
    else:
        logger.info("%s", said)

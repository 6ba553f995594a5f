"""Kernel sets: the four operations of a step behind one interface; a named set runs or raises."""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import ModelConfig, parameter_count
from fullstride.llm.kernels.interface import AXIS, FP8_POOL, Kernels

logger = logging.getLogger("fullstride.llm.kernels")

# Fastest first.
SETS = ("token", "chained", "paged", "plain")
# Bytes of weights from which `auto` passes over the set: 8B's shape in bf16 was no faster with it, for a second copy
# of its weights; 0.6B's was.
MOST_WEIGHTS = {"token": 8e9}
# Why a set cannot be one of several devices' share.
ALONE = {
    "token": "its single launch reads all weights of a step on one GPU",
    "chained": "its single operation computes all layers of a step on one GPU",
}
# Fields of a model beyond those that every set computes; a model is refused by a set that lacks one that it needs.
IN_DECODER = frozenset((
    "unrotated", "wide_qk_norm", "pre_norm", "post_norm", "exact_norm", "norm_offset", "activation", "embedding_scale",
    "rounded_scale", "residual_scale", "logit_divisor", "attention_scale", "logit_cap", "experts", "experts_per_token",
    "shared_weights", "expert_bias", "output_bias", "swiglu_limit",
))  # fmt: skip
IN_ATTENTION = frozenset(("windows", "window_theta", "attention_cap", "sinks"))
COMPUTED: dict[str, frozenset[str]] = {
    "token": frozenset(),
    "chained": frozenset(),
    "paged": IN_DECODER | IN_ATTENTION,
    "plain": IN_DECODER | IN_ATTENTION,
}
# What every set computes: those of Llama, Qwen2 and Qwen3.
COMMON = frozenset((
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim",
    "max_position", "rope_theta", "rope_scaling", "rms_eps", "tied", "qk_norm", "qkv_bias", "eos", "bos", "dtype",
    "rotary_dim",
))  # fmt: skip
# Sets whose operations are larger than one projection.
WHOLE = ("token", "chained")
# Sets whose attention reads keys and values in the weights' dtype alone.
UNROUNDED = ("token",)


def choose(
    name: str,
    model: ModelConfig,
    dtype: str,
    block: int,
    device: Any,
    devices: int = 1,
    pool: str | None = None,
    adapters: bool = False,
    packed: bool = False,
) -> Kernels:
    """Choose the kernel set `name`; `auto` takes the fastest that can run, whose name is in `Kernels.name`.

    The reason for skipping each faster one is logged at the level INFO.

    Args:
        name: `plain` is JAX alone; `paged` has CUDA kernels for attention and for products of few rows, `chained` also
            for all layers of decode steps, `token` also one for whole decode steps of few rows.
        model: configuration of the model.
        dtype: dtype of the weights.
        block: tokens of a KV cache block.
        device: JAX device.
        devices: number of devices that share the model; all are of the same kind.
        pool: dtype of the KV cache, if it differs: `FP8_POOL`.
        adapters: whether rows may have LoRA adapters.
        packed: whether weights are packed.

    Raises:
        ConfigError: for an unknown name, or a set that cannot run this model on this device.

    """
    one_of("kernels", name, ("auto", *SETS))
    found: Kernels | str = ""
    weights = 2 * parameter_count(model)
    for candidate in SETS if name == "auto" else (name,):
        if name == "auto" and weights > MOST_WEIGHTS.get(candidate, weights):
            continue
        found = (
            lacking(candidate, model)
            or _barred(candidate, devices, pool, adapters, packed)
            or _made(candidate, model, dtype, block, device)
        )
        if not isinstance(found, str):
            return found if devices == 1 else found._replace(axis=AXIS)
        logger.info("kernels=%s was chosen; %s cannot be used: %s", name, candidate, found)
    # The plain set runs everything, so one that was named is what cannot.
    raise ConfigError(f"kernels={name}: {found}; take kernels=auto")


def lacking(name: str, model: ModelConfig) -> str:
    """Return why a set cannot compute a model's layers; empty if it can."""
    needed = [each.name for each in fields(model) if getattr(model, each.name) != each.default]
    missing = [field for field in needed if field not in COMMON | COMPUTED[name]]
    return f"its kernels do not compute {', '.join(missing)}, which the {model.architecture} model has" * bool(missing)


def _made(name: str, model: ModelConfig, dtype: str, block: int, device: Any) -> Kernels | str:
    """Return a kernel set, or the reason why it cannot run."""
    if name == "plain":
        from fullstride.llm.kernels.xla.kernels import plain

        return plain(dynamic=device.platform == "cpu")
    from fullstride.llm.kernels.cuda import sets
    from fullstride.llm.kernels.cuda.target import HOPPER, capability_of, target_of

    reason = sets.refusal(name, model, dtype, block, device)
    return reason or sets.made(name, model, device, target_of(capability_of(device)) or HOPPER)


def shared(kernels: Kernels, devices: Sequence[Any]) -> Kernels:
    """Adapt a kernel set to devices that share a model: CUDA sets bring their own all-reduce."""
    if kernels.axis is None or kernels.name == "plain":
        return kernels
    from fullstride.llm.kernels.cuda.p2p_all_reduce import over

    return kernels._replace(all_reduce=over(devices, kernels.axis))


def _barred(name: str, devices: int, pool: str | None, adapters: bool, packed: bool) -> str:
    """Return why a set cannot be used with any model; empty if it can."""
    if devices > 1 and name in ALONE:
        return f"{ALONE[name]}, and tensor_parallel_size is {devices}"
    if pool == FP8_POOL and name in UNROUNDED:
        return "its kernels cannot read quantized keys and values, and kv_cache_dtype is fp8"
    if packed and name in WHOLE:
        return "its kernels read weights in bfloat16 alone, and these are packed"
    if adapters and name in WHOLE:
        return "it computes layers as one operation, which applies no LoRA adapters"
    return ""

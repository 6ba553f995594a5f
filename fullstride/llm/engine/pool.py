"""How large the pool of keys and values is, where the settings do not say how many blocks it has."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.host_memory import free_host_memory

# Of the free memory: what accelerators give, and the most that a length asked for takes. The rest is for temporaries.
SHARE = 0.8
# On a CPU: bytes that are taken for sequences to share, and what of the free memory a pool that nobody asked for has at
# most, since the machine has other work.
CPU_POOL, CPU_SHARE = 512 << 20, 0.25


def block_bytes(model: ModelConfig, dtype: str, block: int) -> int:
    """Of the keys and values of one block, all layers and heads together."""
    return 2 * model.layers * model.kv_heads * model.head_dim * block * np.dtype(dtype).itemsize


def pool_blocks(config: EngineConfig, model: ModelConfig, dtype: str, devices: Sequence[Any], longest: int) -> int:
    """Blocks of the pool, but for its spare one; where free memory decides, the weights are on the devices by now.

    Args:
        config: of the engine.
        model: whose keys and values they are.
        dtype: of the pool's array.
        devices: that share it; none are looked at where the settings say how large it is.
        longest: tokens of a sequence that it should hold.

    Raises:
        ConfigError: if there is no room for a block, or on a CPU not for a sequence of the length that was asked for.

    """
    if config.kv_blocks:
        return config.kv_blocks
    each = block_bytes(model, dtype, config.block_size)
    memory = config.kv_memory or _memory(config, devices, (-(-longest // config.block_size) + 1) * each)
    if (blocks := memory // each - 1) < 1:
        raise ConfigError(f"the pool of {memory} bytes holds no block of {each} bytes beside its spare one: give more")
    return blocks


def _memory(config: EngineConfig, devices: Sequence[Any], one: int) -> int:
    """Bytes, where `one` are what the longest sequence takes."""
    host = devices[0].platform == "cpu"
    free = free_host_memory() if host else _free(devices)
    if free is not None and (config.kv_share or not host):
        return int((config.kv_share or SHARE) * free)
    if config.kv_share or not host:
        raise ConfigError(f"{devices[0]} does not say how much memory it has left: give kv_blocks or kv_memory")
    wanted = max(CPU_POOL, one)
    if free is None:
        return wanted
    usual = min(wanted, int(CPU_SHARE * free))
    return max(usual, _asked(config.max_length, one, free)) if config.max_length else usual


def _asked(length: int, one: int, free: int) -> int:
    if one > SHARE * free:
        raise ConfigError(
            f"max_length={length}: its keys and values take {one / 1e9:.1f} GB; {free / 1e9:.1f} GB are free, of which"
            f" they may take {SHARE:.0%}: ask for less, or take kv_cache_dtype=fp8"
        )
    return one


def _free(devices: Sequence[Any]) -> int | None:
    """Of accelerators, as much on each as on the fullest; None if one does not say."""
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        return None
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats) * len(devices)

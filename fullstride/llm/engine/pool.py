"""Size of the KV cache, if the settings do not give its number of blocks."""

import operator
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.kernels.fp8_pool import token_blocks, whole_blocks

# Of the free memory: what accelerators give, and the most that a length asked for takes. The rest is for temporaries.
SHARE = 0.8
# On a CPU: bytes that are taken for sequences to share, and what of the free memory a pool that nobody asked for has at
# most, since the machine has other work.
CPU_POOL, CPU_SHARE = 512 << 20, 0.25

CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of both versions of Linux's control groups, by the controller with which a process's own group is listed (the newer
# has none): where groups lie, and of one the limit, what is used, and the statistics.
LIMITS = {
    "": (".", "memory.max", "memory.current", "memory.stat"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
# Part of the used memory that is reclaimable: cached files.
CACHES = ("inactive_file", "total_inactive_file")


def pool_bytes(model: ModelConfig, dtype: str, block: int, blocks: int) -> int:
    """Return the bytes of a KV cache with so many blocks and one for scratch; an fp8 one has scales, too."""
    return _block_bytes(model, dtype, block) * whole_blocks(blocks + 1, dtype, model.head_dim)


def _block_bytes(model: ModelConfig, dtype: str, block: int) -> int:
    """Return the bytes of one block's keys and values, over the layers of a group and all heads."""
    return 2 * max(map(len, model.cache_groups)) * model.kv_heads * model.head_dim * block * np.dtype(dtype).itemsize


def pool_blocks(config: EngineConfig, model: ModelConfig, dtype: str, devices: Sequence[Any], needed: int) -> int:
    """Return the number of KV cache blocks, without the scratch block; call it once the weights are on the devices.

    Args:
        config: settings of the engine.
        model: configuration of the model.
        dtype: dtype of the KV cache.
        devices: devices that share it; unused if the settings give its size.
        needed: blocks of the longest sequence that it should hold.

    Raises:
        ConfigError: if there is no room for a block, or on a CPU not for a sequence of the length that was asked for.

    """
    if config.kv_blocks:
        return config.kv_blocks * len(model.cache_groups)
    each = _block_bytes(model, dtype, config.block_size)
    memory = config.kv_memory or _memory(config, devices, pool_bytes(model, dtype, config.block_size, needed))
    if (blocks := token_blocks(memory // each, dtype, model.head_dim) - 1) < 1:
        least = f"{pool_bytes(model, dtype, config.block_size, 1)}, for two blocks, one of them for scratch"
        raise ConfigError(f"a KV cache of {memory} bytes is too small: expected at least {least}")
    return blocks


def _memory(config: EngineConfig, devices: Sequence[Any], one: int) -> int:
    """Return the bytes of the KV cache; the longest sequence needs `one`."""
    host = devices[0].platform == "cpu"
    free = free_host_memory() if host else _free(devices)
    if free is not None and (config.kv_share or not host):
        return int((config.kv_share or SHARE) * free)
    if config.kv_share or not host:
        raise ConfigError(f"{devices[0]} does not report its free memory: set kv_blocks or kv_memory")
    wanted = max(CPU_POOL, one)
    if free is None:
        return wanted
    if config.max_length and one > SHARE * free:
        raise ConfigError(
            f"max_length={config.max_length}: its keys and values take {one / 1e9:.1f} GB; {free / 1e9:.1f} GB are"
            f" free, of which they may take {SHARE:.0%}: set a smaller max_length, or kv_cache_dtype=fp8"
        )
    return max(min(wanted, int(CPU_SHARE * free)), one if config.max_length else 0)


def free_memory(devices: Sequence[Any]) -> int | None:
    """Return the free bytes of devices together, or of the host's memory for a CPU; None if they are not known."""
    return free_host_memory() if devices[0].platform == "cpu" else _free(devices)


def _free(devices: Sequence[Any]) -> int | None:
    """Return the free bytes of accelerators, each counted like the fullest; None if one does not report them."""
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        return None
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats) * len(devices)


def free_host_memory() -> int | None:
    """Return the free bytes of host memory; None if the system does not report them."""
    return min((*_of_machine(), *_of_container()), default=None)


def _of_machine() -> Iterator[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError):
        try:
            yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return


def _of_container() -> Iterator[int]:
    """Yield the free memory of the process's cgroup and of its parents, each of which has its own limit."""
    for controller, (top, limit, used, statistics) in LIMITS.items():
        # If a container sees the host's path, its mount begins at its own group: the rest of the path is missing.
        for group in accumulate(_own_group(controller).parts, operator.truediv, initial=CGROUPS / top):
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (group / statistics).read_text().splitlines())
            except (OSError, ValueError):  # there is none, or its limit is "max"
                continue
            cache = max(int(stat.get(name, 0)) for name in CACHES)
            yield max(0, most - now + cache)


def _own_group(controller: str) -> PurePosixPath:
    """Return the path of the process's cgroup, below the root group."""
    try:
        paths = {names: path for _, names, path in (line.split(":", 2) for line in MINE.read_text().splitlines())}
    except (OSError, ValueError):  # not Linux
        paths = {}
    found = (path for names, path in paths.items() if controller in names.split(","))
    return PurePosixPath(next(found, "").lstrip("/"))

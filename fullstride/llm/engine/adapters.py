"""LoRA adapters of an engine: on the host by their names, and in slots on the device."""

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.models.adapters import fill_slot, shard_order
from fullstride.llm.models.parameters import Weights
from fullstride.llm.weights.peft_adapter import Adapter, read_adapter


class LoadedAdapter(NamedTuple):
    """Adapter on the host; no two that were ever loaded have the same `cache_key`, see `Request`."""

    adapter: Adapter
    cache_key: bytes


class AdapterTable:
    """Loaded adapters on the host, of which some are in slots on the device.

    Attributes:
        loaded: adapters by their names.
        slots: names of those in slots, by the slots' numbers; the one that was used longest ago is the first.

    """

    def __init__(self, config: EngineConfig):
        """Start without adapters."""
        self.rank, self.most = config.max_lora_rank, max(config.max_loras, config.max_cpu_loras or 0)
        self.loaded: dict[str, LoadedAdapter] = {}
        self.slots: OrderedDict[int, str | None] = OrderedDict.fromkeys(range(config.max_loras))
        self._count = 0

    def cache_key(self, name: str | None) -> bytes:
        """Return the cache key of an adapter; that of no adapter for None.

        Raises:
            ConfigError: if there is none of this name.

        """
        if name is None:
            return b""
        if name not in self.loaded:
            there = ", ".join(self.loaded) or "none"
            raise ConfigError(f"adapter={name}: no such adapter is loaded; those that are: {there}")
        return self.loaded[name].cache_key

    def enter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter.

        Raises:
            ConfigError: if the name is taken, its rank is too large, or as many as may be are loaded.

        """
        if not name or name in self.loaded:
            reason = "an adapter of this name is loaded" if name else "expected a name"
            raise ConfigError(f"adapter={name}: {reason}; load it under another one")
        if adapter.rank > self.rank:
            raise ConfigError(f"adapter={name}: its rank is {adapter.rank}: expected at most max_lora_rank={self.rank}")
        if len(self.loaded) >= self.most or not self.slots:
            there = f"max_loras={len(self.slots)}, max_cpu_loras={self.most}"
            larger = "max_cpu_loras" if self.slots else "max_loras"
            raise ConfigError(f"adapter={name}: {there}, and {len(self.loaded)} are loaded: set a larger {larger}")
        self._count += 1
        key = blake2b(name.encode(), key=self._count.to_bytes(8, "little"), digest_size=16).digest()
        self.loaded[name] = LoadedAdapter(adapter, key)

    def leave(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        del self.loaded[name]
        for slot, own in self.slots.items():
            if own == name:
                self.slots[slot] = None
                self.slots.move_to_end(slot, last=False)
                return

    def place(self, name: str, used: Container[str | None]) -> tuple[int, bool] | None:
        """Return the slot of an adapter, and whether it has to be put there; None if others are used in all slots."""
        taken = next((slot for slot, own in self.slots.items() if own == name), None)
        free = next((slot for slot, own in self.slots.items() if own is None or own not in used), None)
        slot = free if taken is None else taken
        if slot is None:
            return None
        self.slots[slot] = name
        self.slots.move_to_end(slot)
        return slot, taken is None


def read_adapters(folders: Mapping[str, str | Path | Adapter], model: ModelConfig) -> dict[str, Adapter]:
    """Read adapters by their names; those that were read already stay.

    Raises:
        ConfigError: see `read_adapter`.

    """
    return {
        name: folder if isinstance(folder, Adapter) else read_adapter(folder, model) for name, folder in folders.items()
    }


def with_room(config: EngineConfig, adapters: Mapping[str, Adapter]) -> EngineConfig:
    """Return settings that have room for these adapters at least, all in one batch unless `max_loras` is given."""
    rank = max((adapter.rank for adapter in adapters.values()), default=1)
    count, rank = config.max_loras or len(adapters), max(config.max_lora_rank, rank)
    most = max(config.max_cpu_loras or 0, count, len(adapters))
    return replace(config, max_loras=count, max_lora_rank=rank, max_cpu_loras=most or None)


def filled(model: ModelConfig, weights: Weights, slot: int, adapter: Adapter, rank: int, devices: int = 1) -> Weights:
    """Return weights with an adapter in a slot of this rank; the slots' old arrays must not be used any more."""
    layers = []
    for index, layer in enumerate(weights.layers):
        made = {}
        for name, slots in (layer.adapters or {}).items():
            own = adapter.fused(model, index, name, rank)
            b = own.b[shard_order(model, name, devices)].T
            made[name] = fill_slot(slots.a.sharding, slots.b.sharding)(slots, jnp.int32(slot), own.a, b)
        layers.append(layer._replace(adapters=made))
    return weights._replace(layers=tuple(layers))

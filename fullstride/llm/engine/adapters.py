"""LoRA adapters of an engine: their names, and the slots on the device that they are in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.models.adapters import fill_slot
from fullstride.llm.models.parameters import Weights
from fullstride.llm.weights.peft_adapter import Adapter, read_adapter


class LoadedAdapter(NamedTuple):
    """Place of an adapter; no two that were ever loaded have the same `cache_key`, see `Request`."""

    slot: int
    cache_key: bytes


@dataclass
class AdapterTable:
    """Names of the loaded adapters.

    Attributes:
        model: configuration of the model that they change.
        slots: number of slots.
        rank: largest rank.
        loaded: places by name.

    """

    model: ModelConfig
    slots: int
    rank: int

    def __post_init__(self):
        """Start without adapters."""
        self.loaded: dict[str, LoadedAdapter] = {}
        self._count = 0

    def find(self, name: str | None) -> LoadedAdapter:
        """Return the place of an adapter; that of no adapter for None.

        Raises:
            ConfigError: if there is none of this name.

        """
        if name is None:
            return LoadedAdapter(-1, b"")
        if name not in self.loaded:
            there = ", ".join(self.loaded) or "none"
            raise ConfigError(f"adapter={name}: no such adapter is loaded; those that are: {there}")
        return self.loaded[name]

    def enter(self, name: str, adapter: Adapter) -> int:
        """Give an adapter a slot, and return its number.

        Raises:
            ConfigError: if the name is taken, its rank is too large, or no slot is free.

        """
        if not name or name in self.loaded:
            reason = "an adapter of this name is loaded" if name else "expected a name"
            raise ConfigError(f"adapter={name}: {reason}; load it under another one")
        if adapter.rank > self.rank:
            raise ConfigError(f"adapter={name}: its rank is {adapter.rank}: expected at most max_lora_rank={self.rank}")
        taken = {each.slot for each in self.loaded.values()}
        free = [slot for slot in range(self.slots) if slot not in taken]
        if not free:
            raise ConfigError(
                f"adapter={name}: max_loras={self.slots} are loaded: unload one, or set a larger max_loras"
            )
        self._count += 1
        key = blake2b(name.encode(), key=self._count.to_bytes(8, "little"), digest_size=16).digest()
        self.loaded[name] = LoadedAdapter(free[0], key)
        return free[0]


def read_adapters(folders: Mapping[str, str | Path | Adapter], model: ModelConfig) -> dict[str, Adapter]:
    """Read adapters by their names; those that were read already stay.

    Raises:
        ConfigError: see `read_adapter`.

    """
    return {
        name: folder if isinstance(folder, Adapter) else read_adapter(folder, model) for name, folder in folders.items()
    }


def with_room(config: EngineConfig, adapters: Mapping[str, Adapter]) -> EngineConfig:
    """Return settings that have room for these adapters at least."""
    rank = max((adapter.rank for adapter in adapters.values()), default=1)
    count, rank = max(config.max_loras, len(adapters)), max(config.max_lora_rank, rank)
    return replace(config, max_loras=count, max_lora_rank=rank)


def filled(model: ModelConfig, weights: Weights, slot: int, adapter: Adapter, rank: int) -> Weights:
    """Return weights with an adapter in a slot of this rank; the slots' old arrays must not be used any more."""
    layers = []
    for index, layer in enumerate(weights.layers):
        made = {}
        for name, slots in (layer.adapters or {}).items():
            own = adapter.fused(model, index, name, rank)
            made[name] = fill_slot(slots, jnp.int32(slot), own.a, own.b.T)
        layers.append(layer._replace(adapters=made))
    return weights._replace(layers=tuple(layers))

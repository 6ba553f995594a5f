"""Tensor-parallel shards: heads, the MLP's inner width and the vocabulary are split (arXiv:1909.08053)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.kernels.interface import AXIS

# Along which axis each parameter is split: outputs, or inputs, whose products are then summed over the devices.
OUTPUTS = frozenset(("q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up", "embed", "head"))
INPUTS = frozenset(("o", "down"))
# Of keys and values: each device has its own heads.
POOL = PartitionSpec(None, None, None, AXIS)

# What is not split over devices.
UNDIVIDED = {
    "experts": "a model with a mixture of experts cannot be split",
    "wide_qk_norm": "a model whose queries and keys are normalized over all heads cannot be split",
}


@runtime_checkable
class ShardedReading(Protocol):
    """Protocol of parameters that can be read in part, such as `fullstride.llm.weights.Parameters`."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray: ...


@runtime_checkable
class MadeOnDevice(Protocol):
    """Protocol of parameters that are created on their device."""

    def make(self, name: str, device: Any, rows: slice | None = None, columns: slice | None = None) -> Array: ...


def refusal(config: ModelConfig, devices: int) -> str | None:
    """Return why `devices` devices cannot share a model, or None if they can."""
    if devices > 1 and (kind := "experts" if config.experts else "wide_qk_norm" if config.wide_qk_norm else None):
        return f"{UNDIVIDED[kind]}: set it to 1"
    sizes = {"query heads": config.heads, "key heads": config.kv_heads, "inner width": config.intermediate_size}
    odd = [f"{size} {name}" if "heads" in name else f"{name} {size}" for name, size in sizes.items() if size % devices]
    if not odd:
        return None
    fine = [n for n in range(1, config.kv_heads + 1) if not any(size % n for size in sizes.values())]
    return f"the model's {', '.join(odd)} cannot be split evenly: take one of {', '.join(map(str, fine))}"


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Return a one-dimensional mesh of the devices."""
    return Mesh(np.asarray(devices), (AXIS,))


class ShardReader:
    """Reader of each device's shard; the host never holds more than one device's part of one matrix."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, np.ndarray], dtype: str, devices: Sequence[Any]):
        """Read for these devices; see `put` for the other arguments."""
        self._shapes, self._parameters, self._dtype = parameter_shapes(config), parameters, dtype
        self.devices = tuple(devices)
        self._mesh = mesh_of(devices)

    def place(self, *names: str) -> Array:
        """Parameters, one below the other in each device's share, on the devices.

        Raises:
            ConfigError: if one is missing or has another shape, or float16 cannot hold a value.

        """
        shares = [
            self.put({name: self.part(name, index) for name in names}, device)
            for index, device in enumerate(self.devices)
        ]
        return self.joined(shares, _axis(names[0]))

    def joined(self, shares: Sequence[Array], axis: int | None) -> Array:
        """Return the array of which each device has a share along an axis, or the whole if it is None."""
        if len(shares) == 1:
            return shares[0]
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        shape = tuple(n * (len(shares) if i == axis else 1) for i, n in enumerate(shares[0].shape))
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, spec), shares)

    def put(self, own: dict[str, Any], device: Any) -> Array:
        """Put parameters, one below the other, on a device.

        Raises:
            ConfigError: if float16 cannot hold a value.

        """
        parts = list(own.values())
        if isinstance(parts[0], jax.Array):
            return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).astype(self._dtype)
        parts = []
        for name, part in ((name, np.asarray(part)) for name, part in own.items()):
            with np.errstate(over="ignore"):
                made = part.astype(self._dtype, copy=False)
            if made.dtype == np.float16 and part.dtype != made.dtype and not np.isfinite(made).all():
                raise ConfigError(f"{name} has values that float16 cannot hold; run it in bfloat16 or float32")
            parts.append(made)
        # XLA frees the host's copy when it has it; a view of a file must not be shared with the device.
        return jax.device_put(parts[0].copy() if len(parts) == 1 else np.concatenate(parts), device)

    def slices(self, name: str, index: int) -> tuple[dict[str, slice], int]:
        """Return which rows or columns one device has, none for all of them, and how many rows it has too few."""
        shape, axis, count = self._shapes[name], _axis(name), len(self.devices)
        if axis is None or count == 1:
            return {}, 0
        each = -(-shape[axis] // count)
        part = slice(min(index * each, shape[axis]), min((index + 1) * each, shape[axis]))
        return {("rows", "columns")[axis]: part}, each - (part.stop - part.start)

    def part(self, name: str, index: int) -> Any:
        """Return one device's part; a vocabulary that does not divide evenly is padded with rows of zeros.

        Raises:
            ConfigError: if it is missing or has another shape.

        """
        if name not in self._parameters:
            raise ConfigError(f"parameter {name} is missing: expected one of shape {self._shapes[name]}")
        shape, axis = self._shapes[name], _axis(name)
        own, missing = self.slices(name, index)
        if not own:
            return self._checked(name, self._read(name, index), shape)
        (part,) = own.values()
        expected = tuple(part.stop - part.start if i == axis else n for i, n in enumerate(shape))
        found = self._checked(name, self._read(name, index, **own), expected)
        pad = jnp.pad if isinstance(found, jax.Array) else np.pad
        return pad(found, [(0, missing if i == axis else 0) for i in range(len(shape))]) if missing else found

    def _read(self, name: str, index: int, **part: slice) -> Any:
        if isinstance(self._parameters, MadeOnDevice):
            return self._parameters.make(name, self.devices[index], **part)
        if part and isinstance(self._parameters, ShardedReading):
            return self._parameters.read(name, **part)
        whole = self._parameters[name]
        if not part:
            return whole
        whole = self._checked(name, whole, self._shapes[name])
        return whole[part["rows"]] if "rows" in part else whole[:, part["columns"]]

    @staticmethod
    def _checked(name: str, value: Any, shape: tuple[int, ...]) -> Any:
        if value.shape != shape:
            raise ConfigError(f"parameter {name} has the shape {value.shape}, expected {shape}")
        return value


def _axis(name: str) -> int | None:
    short = name.rpartition(".")[2]
    return 0 if short in OUTPUTS else 1 if short in INPUTS else None

"""Distribution of a step over devices: each gets a part of the batch, and of the state if that is sharded too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullstride.errors import ConfigError
from fullstride.step.jax.loss import describe

# From a leaf's path, such as `.params.layers[0].weight` or `.opt_state[0].mu.layers[0].weight`, and its shape.
Rule = Callable[[str, tuple[int, ...]], PartitionSpec]
AXIS = "data"


@dataclass(frozen=True)
class Sharding:
    """Mesh of devices, and the placement of arrays on it.

    Attributes:
        mesh: the devices; the batch is divided along the mesh's axis `data`.
        rule: division of each leaf of the state.
        gather: whether parameters are put together before the loss uses them, cast to what it computes in.

    """

    mesh: Mesh
    rule: Rule
    gather: bool = False

    def __post_init__(self) -> None:
        if AXIS not in self.mesh.axis_names:
            raise ConfigError(f"sharding: the mesh's axes are {self.mesh.axis_names}; expected one called {AXIS!r}")

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding with a copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, batch: Any, axis: int = 0) -> Any:
        """Put the batch on the devices, divided along one axis; scalars are copied to all.

        Raises:
            ConfigError: if the devices do not divide a leaf; the message names it.

        """
        return jax.device_put(batch, jax.tree_util.tree_map_with_path(lambda p, x: self._of_batch(p, x, axis), batch))

    def kinds(self, batch: Any, axis: int = 0) -> Any:
        """Return shapes, dtypes and shardings of a batch after `put`."""

        def kind(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._of_batch(path, x, axis))

        return jax.tree_util.tree_map_with_path(kind, batch)

    def _of_batch(self, path: Any, x: Any, axis: int) -> NamedSharding:
        shape, count = np.shape(x), self.mesh.shape[AXIS]
        if len(shape) <= axis:
            return self.everywhere
        if shape[axis] % count:
            name = "batch" + jax.tree_util.keystr(path)
            raise ConfigError(f"{name} is {describe(x)}; its axis {axis} must be divided by {count} devices")
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXIS))

    def gathered(self, model: Any) -> Any:
        """Return the model with whole parameters, inside the compiled step."""
        if not self.gather:
            return model
        whole = self.everywhere
        arrays, rest = eqx.partition(model, lambda x: isinstance(x, jax.Array))
        return eqx.combine(jax.lax.with_sharding_constraint(arrays, whole), rest)


def _mesh(devices: Sequence[Any] | None) -> Mesh:
    return Mesh(np.array(jax.devices() if devices is None else devices), (AXIS,))


def data_parallel(devices: Sequence[Any] | None = None) -> Sharding:
    """Every device holds the whole state and works on its part of the batch; by default on all devices."""
    return Sharding(_mesh(devices), lambda path, shape: PartitionSpec())


def fsdp(devices: Sequence[Any] | None = None, *, smallest: int = 4096) -> Sharding:
    """Every device also holds its part of the state: of each leaf with `smallest` elements or more.

    A leaf is divided along its longest axis that the devices divide; one that has none is copied to all.
    """
    mesh = _mesh(devices)
    count = mesh.shape[AXIS]

    def rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        if int(np.prod(shape)) < smallest or not any(n % count == 0 for n in shape):
            return PartitionSpec()
        axis = max((i for i, n in enumerate(shape) if n % count == 0), key=lambda i: shape[i])
        return PartitionSpec(*[None] * axis, AXIS)

    return Sharding(mesh, rule, gather=True)

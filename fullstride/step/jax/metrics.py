"""Metrics of a step, read one step late so that nothing waits for the step just dispatched."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fullstride.errors import ConfigError
from fullstride.step.jax.watch import translated


class Metrics(Mapping[str, Any]):
    """Mapping of names to values; a value is fetched from the device when it is first read.

    Attributes:
        step: the step they belong to, counted from 1; 0 for the empty metrics that the first call returns.
        arrays: the values as they lie on the device.

    """

    __slots__ = ("_values", "arrays", "step")

    def __init__(self, step: int, arrays: dict[str, Any]):
        self.step, self.arrays = step, arrays
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the value on the host; waits for its step if that is still running.

        Raises:
            EquinoxRuntimeError: what `equinox.error_if` found in that step, with its message.

        """
        if name not in self._values:
            try:
                self._values[name] = jax.tree.map(lambda x: np.asarray(x)[()], self.arrays[name])
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                raise translated(error, f" (step {self.step})") from None
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        """Return the number of names; 0 before any step is done."""
        return len(self.arrays)

    def __repr__(self) -> str:
        return f"Metrics(step={self.step}, {', '.join(f'{k}={v}' for k, v in self.items())})"


# Of a run that has made no step yet.
NOTHING_YET = Metrics(0, {})


def gathered(loss: Any, aux: Any, report: dict[str, Any]) -> dict[str, Any]:
    """Merge loss, report and aux by name; the entries of a dict keep their names.

    Raises:
        ConfigError: if a name is taken, or a value is not an array.

    """
    named = {} if aux is None else aux if isinstance(aux, dict) else {"aux": aux}
    known = {"loss": loss} | report
    if taken := sorted(known.keys() & named.keys()):
        raise ConfigError(f"loss_fn's aux has {', '.join(taken)}, which the step reports itself; use another name")
    for path, leaf in jax.tree_util.tree_leaves_with_path(named):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            name = jax.tree_util.keystr(path)
            raise ConfigError(f"loss_fn's aux{name} is a {type(leaf).__name__}; expected arrays or numbers")
    return known | named

"""Parameters that are rows of a file's matrix: a part of several in one, or all of them in another order."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fullstride.llm.config import FUSED, ModelConfig, parameter_shapes
from fullstride.llm.packed.formats import CodedRows
from fullstride.llm.weights.parameters import StoredCodes, StoredParameter, Values


@dataclass(frozen=True)
class SelectedRows:
    """Rows of a stored parameter.

    Attributes:
        stored: the whole.
        rows: which of its rows; a slice with both ends keeps a view, an array of indices copies.

    """

    stored: StoredParameter
    rows: slice | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        count = self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)
        return (count, *self.stored.shape[1:])

    @property
    def kind(self) -> str:
        """Type of the whole's numbers."""
        return self.stored.kind

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part; of indices the whole span that they lie in is read."""
        if isinstance(self.rows, slice):
            start = self.rows.start
            return self.stored.read(slice(start + rows.start, start + rows.stop), columns, dtype)
        own = self.rows[rows]
        first, last = (int(own.min()), int(own.max()) + 1) if len(own) else (0, 0)
        return self.stored.read(slice(first, last), columns, dtype)[own - first]

    def codes(self, rows: slice, columns: slice) -> CodedRows | None:
        """A part as codes; None if the whole has none."""
        if not isinstance(self.stored, StoredCodes):
            return None
        if isinstance(self.rows, slice):
            start = self.rows.start
            return self.stored.codes(slice(start + rows.start, start + rows.stop), columns)
        found, own = self.stored.codes(slice(0, self.stored.shape[0]), columns), self.rows[rows]
        return None if found is None else CodedRows(found.format, found.codes[own], found.records[own])


def rotary_order(config: ModelConfig, count: int) -> np.ndarray:
    """Return the order of `count` rows of q or k in which the rotated pairs come first in each half of a head.

    Files have the rotated elements, in halves, before the others. Scores are sums over a head's elements, so that any
    order is as good, as long as that of q is that of k; in this one the kernels rotate a head as if it were whole.
    """
    whole, rotated = config.head_dim, config.rotary_dim or config.head_dim
    first, second = np.split(np.arange(rotated), 2)
    rest = np.split(np.arange(rotated, whole), 2)
    head = np.concatenate([first, rest[0], second, rest[1]])
    return (np.arange(0, count, whole)[:, None] + head).reshape(-1)


def arranged(config: ModelConfig, found: Mapping[str, StoredParameter]) -> dict[str, StoredParameter]:
    """Take apart the matrices that hold several parameters, and reorder the rows of partly rotated heads."""
    shapes, apart = parameter_shapes(config), {}
    for name, stored in found.items():
        layer, _, last = name.rpartition(".")
        parts = {f"{layer}.{part}": shapes[f"{layer}.{part}"] for part in FUSED.get(last, ()) if layer}
        ends = np.cumsum([shape[0] for shape in parts.values()])
        if parts and stored.shape == (ends[-1], *next(iter(parts.values()))[1:]):
            starts = [0, *ends[:-1]]
            pieces = {part: slice(int(a), int(b)) for part, a, b in zip(parts, starts, ends, strict=True)}
            apart |= {part: SelectedRows(stored, rows) for part, rows in pieces.items()}
        else:
            apart[name] = stored
    if config.rotary_dim in (None, config.head_dim):
        return apart
    return {
        name: SelectedRows(stored, rotary_order(config, stored.shape[0])) if _turns(config, name, stored) else stored
        for name, stored in apart.items()
    }


def _turns(config: ModelConfig, name: str, stored: StoredParameter) -> bool:
    return name.endswith((".q", ".k", ".q_bias", ".k_bias")) and stored.shape[0] % config.head_dim == 0

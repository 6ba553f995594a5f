"""A model's parameters as they lie in its files: read when they are asked for, whole or a part at a time."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import ml_dtypes  # noqa: F401, teaches numpy the name bfloat16
import numpy as np
from jaxtyping import Float

from fullstride.device.select import cores
from fullstride.errors import ConfigError

# Past it more threads wait for memory: bytes are unpacked about as fast as they are copied.
MOST_THREADS = 8
# Numbers that are not packed, by the names that files give them.
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Values = Float[np.ndarray, "..."]


@runtime_checkable
class StoredParameter(Protocol):
    """One parameter in a file: its shape, and how the file packs its numbers, such as F32, BF16 or Q4_K."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part of it as `dtype`; a vector has rows alone."""
        ...


class Parameters(Mapping[str, np.ndarray]):
    """Parameters by their canonical names, of one dtype.

    A value is read at each access and is kept by nobody: hold on to it, or read it twice. Where the file has this
    very dtype it is a read-only view of the mapped file, and no byte is read until it is used.
    """

    def __init__(self, stored: Mapping[str, StoredParameter], dtype: str):
        """Parameters in files, to be read as `dtype`, by numpy's or ml_dtypes' name."""
        self._stored, self.dtype = stored, np.dtype(dtype)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Values:
        """A parameter, or the part of it that one of several devices holds.

        Args:
            name: as in `parameter_shapes`.
            rows: of the first axis, a projection's outputs; a step other than 1 is an error.
            columns: of the second axis, a projection's inputs.

        Raises:
            KeyError: for a name that the model does not have.
            ConfigError: if float16 was asked for and cannot hold a value.

        """
        stored = self._stored[name]
        sizes = (*stored.shape, 1)
        with np.errstate(over="ignore"):
            part = stored.read(_whole(rows, sizes[0]), _whole(columns, sizes[1]), self.dtype)
        if self.dtype == np.float16 and stored.kind != "F16" and not np.isfinite(part).all():
            raise ConfigError(f"{name} has values that float16 cannot hold; load it as bfloat16 or float32")
        return part

    def stream(self, threads: int | None = None) -> Iterator[tuple[str, Values]]:
        """All parameters in order, unpacked by several threads a few ahead of the one that is given out.

        Args:
            threads: by default the processor's cores, at most 8.

        """
        threads = threads or min(cores(), MOST_THREADS)
        names = iter(self)
        ahead: deque[tuple[str, Future[Values]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for name in names:
                ahead.append((name, pool.submit(self.read, name)))
                if len(ahead) > 2 * threads:
                    name, value = ahead.popleft()
                    yield name, value.result()
            while ahead:
                name, value = ahead.popleft()
                yield name, value.result()

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape; nothing is read."""
        return self._stored[name].shape

    def kind(self, name: str) -> str:
        """How the file packs a parameter's numbers."""
        return self._stored[name].kind

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters once they are read."""
        return sum(int(np.prod(self.shape(name))) for name in self) * self.dtype.itemsize

    def __getitem__(self, name: str) -> Values:
        """A whole parameter."""
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of `parameter_shapes`."""
        return iter(self._stored)

    def __contains__(self, name: object) -> bool:
        """Return whether the model has a parameter `name`; nothing is read."""
        return name in self._stored

    def __len__(self) -> int:
        """How many there are."""
        return len(self._stored)


def _whole(part: slice | None, size: int) -> slice:
    start, stop, step = (part or slice(None)).indices(size)
    if step != 1:
        raise ValueError(f"expected a contiguous part of a parameter; got the step {step}")
    return slice(start, max(start, stop))

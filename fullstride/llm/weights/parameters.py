"""Parameters of a model, read from its files when they are accessed, whole or in parts."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import ml_dtypes  # noqa: F401, teaches numpy the name bfloat16
import numpy as np
from jaxtyping import Float

from fullstride.device.select import cores
from fullstride.errors import ConfigError
from fullstride.llm.packed.formats import FORMATS, CodedRows

# Past it more threads wait for memory: bytes are unpacked about as fast as they are copied.
MOST_THREADS = 8
# Numbers that are not packed, by the names that files give them.
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Values = Float[np.ndarray, "..."]


@runtime_checkable
class StoredParameter(Protocol):
    """Parameter in a file: its shape, and the type of its numbers, such as F32, BF16 or Q4_K."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """Return a part of it as `dtype`; a vector has rows only."""
        ...


@runtime_checkable
class StoredCodes(Protocol):
    """Stored parameter whose packed numbers can be read without unpacking them."""

    def codes(self, rows: slice, columns: slice) -> CodedRows | None:
        """Return a part of it as codes, or None if its type has no packed format."""
        ...


class Parameters(Mapping[str, np.ndarray]):
    """Parameters by their canonical names, of one dtype.

    A value is read at each access and is kept by nobody: hold on to it, or read it twice. Where the file has this
    very dtype it is a read-only view of the mapped file, and no byte is read until it is used.
    """

    def __init__(self, stored: Mapping[str, StoredParameter], dtype: str):
        """Read parameters in files as `dtype`, by NumPy's or ml_dtypes' name."""
        self._stored, self.dtype = stored, np.dtype(dtype)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Values:
        """Return a parameter, or the part of it that one of several devices holds.

        Args:
            name: name in `parameter_shapes`.
            rows: slice of the first axis, a projection's outputs; a step other than 1 is an error.
            columns: slice of the second axis, a projection's inputs.

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

    def codes(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedRows | None:
        """Return a part of a matrix as its file packs it, or None if the file does not, or in no format of `FORMATS`.

        Raises:
            KeyError: for a name that the model does not have.
            ConfigError: if the part begins or ends within a block.

        """
        stored = self._stored[name]
        if self.packed_as(name) is None or not isinstance(stored, StoredCodes):
            return None
        own, part = _whole(rows, stored.shape[0]), _whole(columns, stored.shape[1])
        try:
            return stored.codes(own, part)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def stream(self, threads: int | None = None) -> Iterator[tuple[str, Values]]:
        """Yield all parameters in order, unpacked by several threads a few ahead.

        Args:
            threads: number of threads; by default the processor's cores, at most 8.

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
        """Return a parameter's shape; nothing is read."""
        return self._stored[name].shape

    def kind(self, name: str) -> str:
        """Return the type of a parameter's numbers in the file."""
        return self._stored[name].kind

    def packed_as(self, name: str) -> str | None:
        """Return the name of the packed format, a row of `FORMATS`, that a parameter has in its file; None without."""
        stored = self._stored[name]
        packed = stored.kind in FORMATS and len(stored.shape) == 2 and isinstance(stored, StoredCodes)
        return stored.kind if packed else None

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters once they are read."""
        return sum(int(np.prod(self.shape(name))) for name in self) * self.dtype.itemsize

    def __getitem__(self, name: str) -> Values:
        """Return a whole parameter."""
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of `parameter_shapes`."""
        return iter(self._stored)

    def __contains__(self, name: object) -> bool:
        """Return whether the model has a parameter `name`; nothing is read."""
        return name in self._stored

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._stored)


def _whole(part: slice | None, size: int) -> slice:
    start, stop, step = (part or slice(None)).indices(size)
    if step != 1:
        raise ValueError(f"expected a contiguous part of a parameter; got the step {step}")
    return slice(start, max(start, stop))

"""How the leaves of a state lie in buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Layout(Protocol):
    """Leaves to buffers and back."""

    def pack(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The buffers of these leaves."""
        ...

    def pack_shardings(self, leaves: Sequence[Any], stacked: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The buffers' shardings from the leaves'; `stacked` adds a first axis to one."""
        ...

    def unpack(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves in these buffers, inside a compiled function."""
        ...

    def unpack_eagerly(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """The same outside of one."""
        ...

    def update(self, function: Callable[..., Any], buffers: Sequence[Any], grads: Sequence[Any], loss: Any) -> Any:
        """The new buffers, and the report, of an update that is written for leaves."""
        ...


@dataclass(frozen=True)
class Flat:
    """One buffer for each leaf."""

    def pack(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves themselves."""
        return tuple(leaves)

    def pack_shardings(self, leaves: Sequence[Any], stacked: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The leaves' own."""
        return tuple(leaves)

    def unpack(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """The buffers themselves."""
        return tuple(buffers)

    unpack_eagerly = unpack

    def update(self, function: Callable[..., Any], buffers: Sequence[Any], grads: Sequence[Any], loss: Any) -> Any:
        """`function(buffers, grads, loss)`: leaves are buffers."""
        return function(buffers, grads, loss)
